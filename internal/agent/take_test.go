package agent

import (
	"errors"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// A GPU is unused only if each of its devices shows a list of processes that is empty.
func TestUnused(t *testing.T) {
	at := map[gpu.DeviceID]gpu.Placement{
		"GPU-1": gpu.WholeGPU("GPU-1"), "MIG-a": {GPU: "GPU-2", GI: 1, CI: 0}, "MIG-b": {GPU: "GPU-2", GI: 2, CI: 0},
	}
	now, none, one, server := time.Now(), []gpu.Process{}, []gpu.Process{{PID: 7}}, []gpu.Process{{PID: 8}}
	read := func(id gpu.DeviceID, p *[]gpu.Process) gpu.Usage { return gpu.Usage{Device: id, At: now, Processes: p} }
	for name, tc := range map[string]struct {
		id    gpu.DeviceID
		usage []gpu.Usage
		want  string // error, "" = none

		servers bool
	}{
		"free":                     {"GPU-1", []gpu.Usage{read("GPU-1", &none), read("MIG-a", &one)}, "", false},
		"an MPS server":            {"GPU-1", []gpu.Usage{read("GPU-1", &server)}, "", true},
		"used":                     {"GPU-1", []gpu.Usage{read("GPU-1", &one)}, "GPU GPU-1 is used by processes without a reservation: pid 7", false},
		"an instance is used":      {"GPU-2", []gpu.Usage{read("MIG-a", &none), read("MIG-b", &one)}, "GPU GPU-2 is used by processes without a reservation: pid 7", false},
		"all instances are free":   {"GPU-2", []gpu.Usage{read("MIG-a", &none), read("MIG-b", &none)}, "", false},
		"no list":                  {"GPU-1", []gpu.Usage{read("GPU-1", nil)}, "unknown", false},
		"no answer":                {"GPU-1", []gpu.Usage{{Device: "GPU-1"}}, "unknown", false},
		"no reading of the device": {"GPU-1", nil, "unknown", false},
	} {
		servers, err := unused(tc.id, tc.usage, at, func(p gpu.Process) bool { return p.PID == 8 })
		if servers != tc.servers {
			t.Errorf("%s: servers %v", name, servers)
		}
		switch {
		case tc.want == "unknown":
			if !errors.Is(err, ErrProcessesUnknown) {
				t.Errorf("%s: %v", name, err)
			}
		case (err == nil) != (tc.want == "") || err != nil && err.Error() != tc.want:
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
