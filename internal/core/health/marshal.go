package health

import (
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// The names of enumeration values in files. They do not change when texts for operators change.
var (
	tristateNames       = [...]string{"not-reported", "no", "yes"}
	recoveryActionNames = [...]string{"not-reported", "none", "reset", "reboot", "drain-p2p", "drain-and-reset", "recover-imex", "bus-reset", "system-reboot", "other"}
	fabricNames         = [...]string{"not-reported", "starting", "healthy", "limited", "unhealthy", "misconfigured"}
)

// MarshalText returns the name of the value in files.
func (a Tristate) MarshalText() ([]byte, error) {
	return gpu.MarshalName(a, tristateNames[:], "tristate")
}

// UnmarshalText parses the output of MarshalText.
func (a *Tristate) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(a, tristateNames[:], string(text), "tristate")
}

// MarshalText returns the name of the recovery action in files.
func (v RecoveryAction) MarshalText() ([]byte, error) {
	return gpu.MarshalName(v, recoveryActionNames[:], "recovery action")
}

// UnmarshalText parses the output of MarshalText.
func (v *RecoveryAction) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(v, recoveryActionNames[:], string(text), "recovery action")
}

// MarshalText returns the name of the fabric state in files.
func (f Fabric) MarshalText() ([]byte, error) { return gpu.MarshalName(f, fabricNames[:], "fabric") }

// UnmarshalText parses the output of MarshalText.
func (f *Fabric) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(f, fabricNames[:], string(text), "fabric")
}
