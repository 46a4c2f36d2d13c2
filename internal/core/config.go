package core

import (
	"errors"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Roots are where the host's file systems are mounted. Empty means the host's own path.
type Roots struct {
	Driver string // prefix of the driver's user-space libraries: <Driver>/usr/lib64/libnvidia-ml.so.1 ...
	Dev    string // contains dev/nvidia0 ...
	Sys    string // sysfs, "/sys"
	Proc   string // procfs, "/proc"
	Cgroup string // mount point of the control groups of version 2, "/sys/fs/cgroup"
}

// Config is the configuration of the core. Start from DefaultConfig.
type Config struct {
	inventory.Config
	Rescan time.Duration // interval between complete snapshots; events cause one earlier
	Probe  time.Duration // interval between health checks of a GPU
	Retire time.Duration // how long a unit that is no longer offered stays listed as unhealthy
	Health health.Policy
	Roots  Roots

	ReservationCheck inventory.CheckMode     // what a reservation does about what inventory.Check finds
	Occupancy        inventory.OccupancyMode // what is done about processes without a reservation
}

// DefaultConfig returns the defaults of both agents.
func DefaultConfig() Config {
	return Config{
		Config: inventory.Config{MIG: inventory.MIGNone, Overlap: inventory.OverlapRefuse, Injection: inventory.Injection{Runtime: true}},
		Rescan: time.Minute,
		Probe:  10 * time.Second,
		Retire: 2 * time.Second,
		Health: health.DefaultPolicy(),

		ReservationCheck: inventory.CheckOff,
		Occupancy:        inventory.OccupancyReport,
	}
}

// Validate returns all problems joined (errors.Join of *setting.Error), or nil.
func (c Config) Validate() error {
	var errs []error
	if !slices.Contains([]inventory.MIGStrategy{inventory.MIGNone, inventory.MIGSingle, inventory.MIGMixed}, c.MIG) {
		errs = append(errs, &setting.Error{Key: "mig strategy", Value: string(c.MIG), Remedy: "want none, single or mixed"})
	}
	if !slices.Contains([]inventory.OverlapMode{inventory.OverlapWarn, inventory.OverlapRefuse}, c.Overlap) {
		errs = append(errs, &setting.Error{Key: "overlap", Value: string(c.Overlap), Remedy: "want warn or refuse"})
	}
	if !slices.Contains([]inventory.CheckMode{inventory.CheckOff, inventory.CheckWarn, inventory.CheckRefuse}, c.ReservationCheck) {
		errs = append(errs, &setting.Error{Key: "reservation check", Value: string(c.ReservationCheck), Remedy: "want off, warn or refuse"})
	}
	if !slices.Contains([]inventory.OccupancyMode{inventory.OccupancyOff, inventory.OccupancyReport, inventory.OccupancyWithhold}, c.Occupancy) {
		errs = append(errs, &setting.Error{Key: "occupancy", Value: string(c.Occupancy), Remedy: "want off, report or withhold"})
	}
	for _, d := range []struct {
		key   string
		value time.Duration
	}{{"rescan", c.Rescan}, {"probe", c.Probe}} {
		if d.value <= 0 {
			errs = append(errs, &setting.Error{Key: d.key, Value: d.value.String(), Remedy: "want a positive duration such as 30s"})
		}
	}
	return errors.Join(append(errs, c.Health.Validate()...)...)
}
