# fish completion of $PROGRAM: $PROGRAM completion fish | source; or as a file in ~/.config/fish/completions
function $FUNCTION
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program $words[1]
    set -e words[1]
    set -l found ($program __complete $words "$current" 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path "$current"
    end
end
complete -c $PROGRAM -f -a '($FUNCTION)'
