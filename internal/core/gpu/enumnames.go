package gpu

import (
	"fmt"
	"slices"
)

// toggleNames are the names of Toggle values in files.
var toggleNames = [...]string{"unknown", "disabled", "enabled"}

// MarshalText returns the name of the value in files.
func (t Toggle) MarshalText() ([]byte, error) { return MarshalName(t, toggleNames[:], "toggle") }

// UnmarshalText parses the output of MarshalText.
func (t *Toggle) UnmarshalText(text []byte) error {
	return UnmarshalName(t, toggleNames[:], string(text), "toggle")
}

// MarshalName returns the name of an enumeration's value in files. It fails for a value without a name. The
// argument what names the enumeration in the error.
func MarshalName[T ~uint8](v T, names []string, what string) ([]byte, error) {
	if int(v) >= len(names) {
		return nil, fmt.Errorf("no %s %d", what, v)
	}
	return []byte(names[v]), nil
}

// UnmarshalName sets v to the index of text in names. It fails if text is not in names. The argument what names
// the enumeration in the error.
func UnmarshalName[T ~uint8](v *T, names []string, text, what string) error {
	i := slices.Index(names, text)
	if i < 0 || text == "" {
		return fmt.Errorf("unknown %s %q", what, text)
	}
	*v = T(i)
	return nil
}
