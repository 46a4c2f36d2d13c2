package health

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// The names of enumeration values in files. They do not change when texts for operators change.
var (
	tristateNames       = [...]string{"unsaid", "no", "yes"}
	recoveryActionNames = [...]string{"unsaid", "none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "other"}
	fabricNames         = [...]string{"unsaid", "starting", "well", "limited", "unhealthy", "misconfigured"}
)

// MarshalText returns the name of the value in files.
func (a Tristate) MarshalText() ([]byte, error) {
	return gpu.MarshalName(a, tristateNames[:], "answer")
}

// UnmarshalText parses the output of MarshalText.
func (a *Tristate) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(a, tristateNames[:], string(text), "answer")
}

// MarshalText returns the name of the recovery action in files.
func (v RecoveryAction) MarshalText() ([]byte, error) {
	return gpu.MarshalName(v, recoveryActionNames[:], "verdict")
}

// UnmarshalText parses the output of MarshalText.
func (v *RecoveryAction) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(v, recoveryActionNames[:], string(text), "verdict")
}

// MarshalText returns the name of the fabric state in files.
func (f Fabric) MarshalText() ([]byte, error) { return gpu.MarshalName(f, fabricNames[:], "fabric") }

// UnmarshalText parses the output of MarshalText.
func (f *Fabric) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(f, fabricNames[:], string(text), "fabric")
}
