package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

func TestReservationCheckWarnings(t *testing.T) {
	for name, tc := range map[string]struct {
		mode      inventory.CheckMode
		namespace string // "" = procfs shows none
		want      int
	}{
		"off":             {inventory.CheckOff, "pid:[4026532000]", 0},
		"of the host":     {inventory.CheckRefuse, hostPIDNamespace, 0},
		"of a pod":        {inventory.CheckRefuse, "pid:[4026532000]", 1},
		"of a pod, warns": {inventory.CheckWarn, "pid:[4026532000]", 1},
		"not known":       {inventory.CheckWarn, "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			c := core.DefaultConfig()
			c.ReservationCheck, c.Roots.Proc = tc.mode, t.TempDir()
			dir := filepath.Join(c.Roots.Proc, "self", "ns")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if tc.namespace != "" {
				if err := os.Symlink(tc.namespace, filepath.Join(dir, "pid")); err != nil {
					t.Fatal(err)
				}
			}
			if got := reservationCheckWarnings(c); len(got) != tc.want {
				t.Errorf("%q", got)
			}
		})
	}
}
