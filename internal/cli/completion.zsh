#compdef $PROGRAM
# zsh completion of $PROGRAM: source <($PROGRAM completion zsh), after compinit; or as a file _$PROGRAM in a folder of $fpath
$FUNCTION() {
	local line
	local -a values shown
	for line in "${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT-1]}" "$PREFIX" 2>/dev/null)}"; do
		[[ -z $line ]] && continue
		values+=("${line%%$'\t'*}")
		shown+=("${line/$'\t'/  -- }")
	done
	if (( ${#values} )); then
		compadd -l -d shown -a values
	else
		_files
	fi
}
if [[ ${funcstack[1]} == _* && ${funcstack[1]} != $FUNCTION ]]; then
	$FUNCTION "$@"
else
	compdef $FUNCTION $PROGRAM
fi
