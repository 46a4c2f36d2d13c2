package core

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// MIGStrategy says which devices of a GPU in MIG mode are offered.
type MIGStrategy string

// The strategies; names and meanings are those of NVIDIA's k8s-device-plugin.
const (
	MIGNone   MIGStrategy = "none"   // full GPUs only, MIG mode is ignored
	MIGSingle MIGStrategy = "single" // every GPU is cut into instances of one profile, offered as GPUs
	MIGMixed  MIGStrategy = "mixed"  // instances beside full GPUs, each under its own profile
)

// Roots say where the host's file systems are. Empty means the host's own ("/").
type Roots struct {
	Driver string // where the driver's user-space libraries are looked for: <Driver>/usr/lib64/libnvidia-ml.so.1 ...
	Dev    string // holds dev/nvidia0 ...
	Sys    string // sysfs, "/sys"
	Proc   string // procfs, "/proc"
}

// Config is everything the core can be told. Start from DefaultConfig.
type Config struct {
	MIG         MIGStrategy
	Exclude     []DeviceID    // never offered; a full GPU's UUID does not exclude its MIG instances
	Rescan      time.Duration // between full readings of the machine; events bring one forward
	Probe       time.Duration // between checks of every GPU's health
	Retire      time.Duration // how long a unit withdrawn by intent stays listed as unhealthy
	Policy      Policy
	Packed      bool        // of shared devices those in use are preferred; else those that are used least
	Overlap     OverlapMode // what becomes of a device that another agent on this host offers too
	DeviceNodes bool        // plans carry device nodes beside the environment
	Health      HealthPolicy
	Roots       Roots
}

// DefaultConfig is what both agents start from.
func DefaultConfig() Config {
	return Config{
		MIG:     MIGNone,
		Overlap: OverlapWarn,
		Rescan:  time.Minute,
		Probe:   10 * time.Second,
		Retire:  2 * time.Second,
		Health:  DefaultHealthPolicy(),
	}
}

// ConfigError is one thing wrong with a configuration, in the words of the one who wrote it.
type ConfigError struct {
	Key    string // as it is spelled where it was set
	Value  string // as it was given; "" if none was
	Remedy string // what to write instead
}

func (e *ConfigError) Error() string {
	return fmt.Sprintf("%s = %q: %s", e.Key, e.Value, e.Remedy)
}

// Validate returns every problem at once (errors.Join of *ConfigError), or nil.
func (c Config) Validate() error {
	var errs []error
	if !slices.Contains([]MIGStrategy{MIGNone, MIGSingle, MIGMixed}, c.MIG) {
		errs = append(errs, &ConfigError{"mig strategy", string(c.MIG), "want none, single or mixed"})
	}
	if !slices.Contains([]OverlapMode{OverlapWarn, OverlapRefuse}, c.Overlap) {
		errs = append(errs, &ConfigError{"overlap", string(c.Overlap), "want warn or refuse"})
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"rescan", c.Rescan}, {"probe", c.Probe}} {
		if d.value <= 0 {
			errs = append(errs, &ConfigError{d.key, d.value.String(), "want a positive duration such as 30s"})
		}
	}
	return errors.Join(append(errs, c.Health.validate()...)...)
}
