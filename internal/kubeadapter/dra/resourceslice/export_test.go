package resourceslice

var (
	TaintKey = taintKey
	TaintOf  = taintOf
)
