package inventory

import "fmt"

// Sharing is how a device is shared by several units. The zero value is a device with one unit.
type Sharing struct {
	Mode          SharingMode
	Replicas      int       // units per device, 2 or more
	OnePerRequest bool      // refuse a request for more than one unit, which would not get more of a GPU
	Memory        uint64    // bytes of device memory for each share; 0 = the MPS daemon's setting, or with Limit an equal part of the device
	Threads       int       // percent of a GPU's threads for each MPS client; 0 = the daemon's setting
	Limit         LimitMode // of TimeSlicing: whether the driver limits the memory of a share
}

// SharingMode is the mechanism by which workloads share a device.
type SharingMode uint8

// The sharing modes. Neither TimeSlicing nor MPS isolates workloads as MIG does.
const (
	Exclusive   SharingMode = iota // not shared
	TimeSlicing                    // CUDA time-slicing; memory is not limited unless by Sharing.Limit
	MPS                            // CUDA Multi-Process Service, with a control daemon for each pool
)

var sharingModeNames = [...]string{"exclusive", "time-slicing", "mps"}

// String returns the name of the mode: "time-slicing".
func (m SharingMode) String() string { return sharingModeNames[m] }

// Suffix returns the suffix of the default name of a shared pool, so that a request for a GPU never gets a
// replica.
func (m SharingMode) Suffix() string { return [...]string{"", ".shared", ".mps"}[m] }

// String returns the mode and the number of replicas: "time-slicing by 4".
func (s Sharing) String() string {
	if s.Mode == Exclusive {
		return s.Mode.String()
	}
	return fmt.Sprintf("%s by %d", s.Mode, s.Replicas)
}

// Description returns everything that distinguishes one kind of sharing from another, as text.
func (s Sharing) Description() string {
	text := s.String()
	if s.Mode == TimeSlicing && s.OnePerRequest {
		text += ", one a request"
	}
	if s.Memory > 0 {
		text += fmt.Sprintf(", %d MiB each", s.Memory>>20)
	}
	if s.Threads > 0 {
		text += fmt.Sprintf(", %d%% of the threads each", s.Threads)
	}
	if s.Limit != LimitNone && s.Memory == 0 {
		text += ", an equal part of the memory each"
	}
	if s.Limit != LimitNone {
		text += ", limit " + s.Limit.String()
	}
	return text
}

// mixedPoolWarnings returns a warning for each pool with units that are shared differently, or that containers get
// differently, because a request can't distinguish them.
func mixedPoolWarnings(units []Unit) (warnings []string) {
	type reports struct{ sharing, injection bool }
	first, reported := map[string]*Unit{}, map[string]reports{}
	warn := func(u *Unit, differ, one, other string) {
		warnings = append(warnings, fmt.Sprintf("pool %s has units that %s differently (%s and %s): give them different names", u.Pool, differ, one, other))
	}
	for i := range units {
		u := &units[i]
		if i > 0 && u.Pool == units[i-1].Pool && u.Sharing == units[i-1].Sharing && u.Injection == units[i-1].Injection {
			continue
		}
		f, done := first[u.Pool], reported[u.Pool]
		if f == nil {
			first[u.Pool] = u
			continue
		}
		if f.Sharing != u.Sharing && !done.sharing {
			done.sharing = true
			warn(u, "are shared", f.Sharing.Description(), u.Sharing.Description())
		}
		if f.Injection != u.Injection && !done.injection {
			done.injection = true
			warn(u, "containers get", f.Injection.Name, u.Injection.Name)
		}
		reported[u.Pool] = done
	}
	return warnings
}
