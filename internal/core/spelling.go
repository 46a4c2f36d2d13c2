package core

import "fmt"

// Words of enumerations in files. They stay when what people read changes.
var (
	answers  = [...]string{"unsaid", "no", "yes"}
	verdicts = [...]string{"unsaid", "none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "other"}
	fabrics  = [...]string{"unsaid", "starting", "well", "limited", "unhealthy", "misconfigured"}
	toggles  = [...]string{"unknown", "disabled", "enabled"}
)

// MarshalText spells the answer for files.
func (a Tristate) MarshalText() ([]byte, error) { return spell(a, answers[:], "answer") }

// UnmarshalText reads what MarshalText wrote.
func (a *Tristate) UnmarshalText(text []byte) error {
	return spelled(a, answers[:], string(text), "answer")
}

// MarshalText spells the verdict for files.
func (v RecoveryAction) MarshalText() ([]byte, error) { return spell(v, verdicts[:], "verdict") }

// UnmarshalText reads what MarshalText wrote.
func (v *RecoveryAction) UnmarshalText(text []byte) error {
	return spelled(v, verdicts[:], string(text), "verdict")
}

// MarshalText spells the state of the fabric for files.
func (f Fabric) MarshalText() ([]byte, error) { return spell(f, fabrics[:], "fabric") }

// UnmarshalText reads what MarshalText wrote.
func (f *Fabric) UnmarshalText(text []byte) error {
	return spelled(f, fabrics[:], string(text), "fabric")
}

// MarshalText spells the position for files.
func (t Toggle) MarshalText() ([]byte, error) { return spell(t, toggles[:], "toggle") }

// UnmarshalText reads what MarshalText wrote.
func (t *Toggle) UnmarshalText(text []byte) error {
	return spelled(t, toggles[:], string(text), "toggle")
}

func spell[T ~uint8](v T, names []string, what string) ([]byte, error) {
	if int(v) >= len(names) {
		return nil, fmt.Errorf("no %s %d", what, v)
	}
	return []byte(names[v]), nil
}

// spelled sets v to the index of text among the names.
func spelled[T ~uint8](v *T, names []string, text, what string) error {
	for i, name := range names {
		if name == text && name != "" {
			*v = T(i)
			return nil
		}
	}
	return fmt.Errorf("unknown %s %q", what, text)
}
