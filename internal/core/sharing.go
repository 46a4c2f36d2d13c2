package core

import "fmt"

// Sharing is how a device is offered more than once. The zero value is a device that is offered once.
type Sharing struct {
	Mode          SharingMode
	Replicas      int    // units per device, 2 or more
	OnePerRequest bool   // a request for more than one unit is refused: more would not be more of a GPU
	Memory        uint64 // bytes of device memory that one MPS client may have; 0 = what the daemon says
	Threads       int    // percent of a GPU's threads that one MPS client may use; 0 = what the daemon says
}

// SharingMode is what workloads on one device share it by.
type SharingMode uint8

// The modes. Neither of the last two isolates workloads from each other as MIG does.
const (
	Exclusive   SharingMode = iota // one workload
	TimeSlicing                    // CUDA's time slices; nothing limits memory
	MPS                            // CUDA's Multi-Process Service, of a control daemon per pool
)

var sharingModeNames = [...]string{"exclusive", "time-slicing", "mps"}

func (m SharingMode) String() string { return sharingModeNames[m] }

// Suffix ends the default name of a pool whose devices are shared by a rule, so that no request for a GPU of
// one's own gets a share.
func (m SharingMode) Suffix() string { return [...]string{"", ".shared", ".mps"}[m] }

func (s Sharing) String() string {
	if s.Mode == Exclusive {
		return s.Mode.String()
	}
	return fmt.Sprintf("%s by %d", s.Mode, s.Replicas)
}

// Terms say all of how a device is shared, so that two ways never read the same.
func (s Sharing) Terms() string {
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
	return text
}

// mixedPoolWarnings names the pools whose units are not alike: a request can't tell them apart.
func mixedPoolWarnings(units []Unit) (findings []string) {
	first := map[string]Sharing{}
	said := map[string]bool{}
	for _, u := range units {
		s, ok := first[u.Pool]
		if !ok {
			first[u.Pool] = u.Sharing
		} else if s != u.Sharing && !said[u.Pool] {
			said[u.Pool] = true
			findings = append(findings, fmt.Sprintf("pool %s has units that are shared differently (%s and %s): give them different names",
				u.Pool, s.Terms(), u.Sharing.Terms()))
		}
	}
	return findings
}
