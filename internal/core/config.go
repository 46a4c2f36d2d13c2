package core

import (
	"errors"
	"slices"
	"time"
)

// Roots are where the host's file systems are mounted. Empty means the host's own path.
type Roots struct {
	Driver string // prefix of the driver's user-space libraries: <Driver>/usr/lib64/libnvidia-ml.so.1 ...
	Dev    string // contains dev/nvidia0 ...
	Sys    string // sysfs, "/sys"
	Proc   string // procfs, "/proc"
}

// Config is the configuration of the core. Start from DefaultConfig.
type Config struct {
	InventoryConfig
	Rescan time.Duration // interval between complete snapshots; events cause one earlier
	Probe  time.Duration // interval between health checks of a GPU
	Retire time.Duration // how long a unit that is no longer offered stays listed as unhealthy
	Health HealthPolicy
	Roots  Roots
}

// DefaultConfig returns the defaults of both agents.
func DefaultConfig() Config {
	return Config{
		InventoryConfig: InventoryConfig{MIG: MIGNone, Overlap: OverlapWarn},
		Rescan:          time.Minute,
		Probe:           10 * time.Second,
		Retire:          2 * time.Second,
		Health:          DefaultHealthPolicy(),
	}
}

// Validate returns all problems joined (errors.Join of *ConfigError), or nil.
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
	return errors.Join(append(errs, c.Health.Validate()...)...)
}
