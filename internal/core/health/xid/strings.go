package xid

import "strings"

// String returns the name of the class: "application".
func (c Class) String() string {
	return [...]string{
		"", "application", "contained", "reset", "node", "fabric", "info", "suspect", "trigger",
	}[c]
}

// String returns the name of the effect: "degraded".
func (e Effect) String() string {
	return [...]string{"none", "degraded", "unhealthy", "lost"}[e]
}

// String lists the signs: "recovery action None, a reset or a reboot"; "an operator (command clear)" for the empty set.
func (e Evidence) String() string {
	var signs []string
	for i, sign := range [...]string{
		"recovery action None", "a reset", "a reboot", "the end of the condition", "a time without a repeat",
	} {
		if e&(1<<i) != 0 {
			signs = append(signs, sign)
		}
	}
	switch last := len(signs) - 1; last {
	case -1:
		return "an operator (command clear)"
	case 0:
		return signs[0]
	default:
		return strings.Join(signs[:last], ", ") + " or " + signs[last]
	}
}

// String describes the state: "link down".
func (l Level) String() string {
	return [...]string{"", "memory repair pending", "resource repair pending", "link down"}[l]
}
