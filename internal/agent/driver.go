package agent

import (
	"errors"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
)

// OpenDriver returns a function that opens a session with the driver beneath the roots of a configuration. With fallback, a driver that is not
// there is also searched where the dynamic linker finds libraries: NVIDIA's container runtime puts it there.
func OpenDriver(c core.Config, fallback bool) func() (monitor.Session, error) {
	return func() (monitor.Session, error) {
		o := nvidia.Options{Roots: c.Roots, Processes: c.ReservationCheck.Enabled(), UsedBy: readsUsers(c)}
		session, err := nvidia.Open(o)
		if fallback && errors.Is(err, gpu.ErrNoDriver) {
			o.Roots.Driver = ""
			other, otherErr := nvidia.Open(o)
			if !errors.Is(otherErr, gpu.ErrNoDriver) || errors.Is(otherErr, gpu.ErrUnloaded) && !errors.Is(err, gpu.ErrUnloaded) {
				session, err = other, otherErr
			}
		}
		if err != nil {
			return nil, err // not session: a nil *Session in an interface is not nil
		}
		return session, nil
	}
}

// DriverCalls returns the counters of driver calls since the process started. It waits for no call and takes no lock.
func DriverCalls() []gpu.CallCount { return nvidia.DriverCalls() }
