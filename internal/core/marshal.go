package core

// The names of enumerations in files. They stay when the texts that people read change.
var (
	tristateNames       = [...]string{"unsaid", "no", "yes"}
	recoveryActionNames = [...]string{"unsaid", "none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "other"}
	fabricNames         = [...]string{"unsaid", "starting", "well", "limited", "unhealthy", "misconfigured"}
)

// MarshalText spells the answer for files.
func (a Tristate) MarshalText() ([]byte, error) { return MarshalName(a, tristateNames[:], "answer") }

// UnmarshalText reads what MarshalText wrote.
func (a *Tristate) UnmarshalText(text []byte) error {
	return UnmarshalName(a, tristateNames[:], string(text), "answer")
}

// MarshalText spells the verdict for files.
func (v RecoveryAction) MarshalText() ([]byte, error) {
	return MarshalName(v, recoveryActionNames[:], "verdict")
}

// UnmarshalText reads what MarshalText wrote.
func (v *RecoveryAction) UnmarshalText(text []byte) error {
	return UnmarshalName(v, recoveryActionNames[:], string(text), "verdict")
}

// MarshalText spells the state of the fabric for files.
func (f Fabric) MarshalText() ([]byte, error) { return MarshalName(f, fabricNames[:], "fabric") }

// UnmarshalText reads what MarshalText wrote.
func (f *Fabric) UnmarshalText(text []byte) error {
	return UnmarshalName(f, fabricNames[:], string(text), "fabric")
}
