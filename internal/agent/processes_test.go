package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestProcessProblems(t *testing.T) {
	for name, tc := range map[string]struct {
		mode      inventory.CheckMode
		occupancy inventory.OccupancyMode
		namespace string // "" = procfs shows none
		want      int
		read      bool // processes are
	}{
		"off":                {inventory.CheckOff, inventory.OccupancyReport, "pid:[4026532000]", 0, false},
		"of the host":        {inventory.CheckRefuse, inventory.OccupancyWithhold, "pid:[4026531836]", 0, true},
		"nothing reads them": {inventory.CheckOff, inventory.OccupancyOff, "pid:[4026531836]", 0, false},
		"of a pod":           {inventory.CheckRefuse, inventory.OccupancyReport, "pid:[4026532000]", 1, false},
		"of a pod, warns":    {inventory.CheckWarn, inventory.OccupancyOff, "pid:[4026532000]", 1, false},
		"of a pod, withheld": {inventory.CheckWarn, inventory.OccupancyWithhold, "pid:[4026532000]", 2, false},
		"not known":          {inventory.CheckWarn, inventory.OccupancyWithhold, "", 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			c := core.DefaultConfig()
			c.ReservationCheck, c.Occupancy, c.Roots.Proc = tc.mode, tc.occupancy, t.TempDir()
			dir := filepath.Join(c.Roots.Proc, "self", "ns")
			check.NoError(t, os.MkdirAll(dir, 0o755))
			if tc.namespace != "" {
				check.NoError(t, os.Symlink(tc.namespace, filepath.Join(dir, "pid")))
			}
			if got := processProblems(c); len(got) != tc.want || readsUsers(c) != tc.read {
				t.Errorf("%q, processes are read: %t", got, readsUsers(c))
			}
		})
	}
}
