# bash completion of $PROGRAM: source <($PROGRAM completion bash)
$FUNCTION() {
	local line="${COMP_LINE:0:COMP_POINT}" current="" cut="" breaks="" word
	local -a words
	read -ra words <<<"$line"
	if [[ $line == *[[:space:]] ]]; then
		words+=("")
	fi
	current="${words[${#words[@]}-1]}"
	# Of a word with a character that divides words for bash, only what follows the last one is replaced.
	[[ $COMP_WORDBREAKS == *:* ]] && breaks+=":"
	[[ $COMP_WORDBREAKS == *=* ]] && breaks+="="
	if [[ -n $breaks && $current == *[$breaks]* ]]; then
		cut="${current%"${current##*[$breaks]}"}"
	fi
	COMPREPLY=()
	while IFS=$'\t' read -r word _; do
		COMPREPLY+=("${word#"$cut"}")
	done < <("$1" __complete "${words[@]:1}" 2>/dev/null)
}
complete -o bashdefault -o default -F $FUNCTION $PROGRAM
