package core

import (
	"errors"
	"slices"
	"time"
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
	InventoryConfig
	Rescan time.Duration // between full readings of the machine; events bring one forward
	Probe  time.Duration // between checks of every GPU's health
	Retire time.Duration // how long a unit withdrawn by intent stays listed as unhealthy
	Health HealthPolicy
	Roots  Roots
}

// DefaultConfig is what both agents start from.
func DefaultConfig() Config {
	return Config{
		InventoryConfig: InventoryConfig{MIG: MIGNone, Overlap: OverlapWarn},
		Rescan:          time.Minute,
		Probe:           10 * time.Second,
		Retire:          2 * time.Second,
		Health:          DefaultHealthPolicy(),
	}
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
	return errors.Join(append(errs, c.Health.Validate()...)...)
}
