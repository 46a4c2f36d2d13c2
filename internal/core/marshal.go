package core

// The names of enumerations in files. They stay when the texts that people read change.
var (
	answers  = [...]string{"unsaid", "no", "yes"}
	verdicts = [...]string{"unsaid", "none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "other"}
	fabrics  = [...]string{"unsaid", "starting", "well", "limited", "unhealthy", "misconfigured"}
)

// MarshalText spells the answer for files.
func (a Tristate) MarshalText() ([]byte, error) { return MarshalName(a, answers[:], "answer") }

// UnmarshalText reads what MarshalText wrote.
func (a *Tristate) UnmarshalText(text []byte) error {
	return UnmarshalName(a, answers[:], string(text), "answer")
}

// MarshalText spells the verdict for files.
func (v RecoveryAction) MarshalText() ([]byte, error) { return MarshalName(v, verdicts[:], "verdict") }

// UnmarshalText reads what MarshalText wrote.
func (v *RecoveryAction) UnmarshalText(text []byte) error {
	return UnmarshalName(v, verdicts[:], string(text), "verdict")
}

// MarshalText spells the state of the fabric for files.
func (f Fabric) MarshalText() ([]byte, error) { return MarshalName(f, fabrics[:], "fabric") }

// UnmarshalText reads what MarshalText wrote.
func (f *Fabric) UnmarshalText(text []byte) error {
	return UnmarshalName(f, fabrics[:], string(text), "fabric")
}
