package core

import "fmt"

// toggleNames are the names of a Toggle in files.
var toggleNames = [...]string{"unknown", "disabled", "enabled"}

// MarshalText spells the position for files.
func (t Toggle) MarshalText() ([]byte, error) { return MarshalName(t, toggleNames[:], "toggle") }

// UnmarshalText reads what MarshalText wrote.
func (t *Toggle) UnmarshalText(text []byte) error {
	return UnmarshalName(t, toggleNames[:], string(text), "toggle")
}

// MarshalName returns the name of an enumeration's value, by which files have it. It fails for a value without a name.
func MarshalName[T ~uint8](v T, names []string, what string) ([]byte, error) {
	if int(v) >= len(names) {
		return nil, fmt.Errorf("no %s %d", what, v)
	}
	return []byte(names[v]), nil
}

// UnmarshalName sets v to the index of text among the names. It fails if text is none of them.
func UnmarshalName[T ~uint8](v *T, names []string, text, what string) error {
	for i, name := range names {
		if name == text && name != "" {
			*v = T(i)
			return nil
		}
	}
	return fmt.Errorf("unknown %s %q", what, text)
}
