package core

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// verdictsFor is for how long the verdicts about GPUs stay while the driver is released for the reset of one. The reset itself takes seconds.
const verdictsFor = time.Minute

// Release is a time in which the driver is not called because a GPU of the node is reset, up to the first reading after it. The zero value is none.
//
//	Host       DriverReleased ................. ""
//	session    closed ......................... opened, read
//	Release    GPU, Since ............................... none
//	units      RESETTING, and none is given out ......... their verdicts of before, or what was read
//	ledger     as it is; after verdictsFor: the driver is not called, as in maintenance
type Release struct {
	GPU   gpu.DeviceID // that is reset
	Since time.Time
}

// releaseDriver records that the driver is released for the reset of a GPU. One that begins before the first reading after another one goes on with that:
// the verdicts are as old.
func (s State) releaseDriver(now time.Time, id gpu.DeviceID) State {
	if s.Release.GPU == "" {
		s.Release.Since = now
		s.Ledger = s.Ledger.Paused(now)
	}
	s.Release.GPU = id
	return s
}

// DriverReleased reports whether the driver is not to be called because a GPU is reset.
func (s State) DriverReleased() bool { return s.Host.Ownership.DriverReleased != "" }

// keepsVerdicts reports whether nothing is checked, and the verdicts of before count.
func (s State) keepsVerdicts() bool {
	return s.Release.GPU != "" && s.Snapshot.Driver.State == gpu.DriverReady
}

// WithoutOldVerdicts returns the state in which the driver is not called, as in maintenance, if it has been released for so long that the verdicts of before
// do not count any more; else s.
func (s State) WithoutOldVerdicts(cfg Config, now time.Time) State {
	reading := gpu.NoDriver(gpu.DriverReleased, inventory.ReleasedFor(s.Release.GPU))
	is := s.Snapshot.Driver
	known := is.State == gpu.DriverReady || is.State == gpu.DriverPending
	old := known && now.Sub(s.Release.Since) >= verdictsFor
	maintained := s.DriverReleased() && is.State == gpu.DriverReleased && is.Reason != reading.Driver.Reason && !s.Maintenance.Active(now)
	if s.Release.GPU == "" || !old && !maintained {
		return s
	}
	return s.Read(cfg, now, reading)
}
