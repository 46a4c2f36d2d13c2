package usage

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/test/check"
)

// The folder has a file for each GPU that work has, as dcgm-exporter reads it, and those of other programs.
func TestJobFiles(t *testing.T) {
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	inv := core.Build(coretest.WithMIG(coretest.GPUs(3), 2, "1g.10gb", "1g.10gb"), health.Ledger{}, c).WithoutHost()
	pod := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "one", ID: "uid", Container: "a"}
	side := pod
	side.Container = "b"
	task := holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Name: "train", ID: allocID, Container: "main"}
	bare := holders.Work{Orchestrator: holders.Nomad, ID: allocID}
	held := func(owners ...holders.Work) (d use.Device) {
		for _, o := range owners {
			d.Holders = append(d.Holders, holders.Holder{Work: o})
		}
		return d
	}
	table := func(by map[int]use.Device) (t use.Table) {
		i := 0
		for u := range inv.Devices() { // GPU 0, GPU 1, two instances of GPU 2
			d := by[i]
			d.ID = u.Device.ID
			t.Devices = append(t.Devices, d)
			i++
		}
		return t
	}
	folder := filepath.Join(t.TempDir(), "jobs")
	f := jobFiles{folder: folder, orchestrator: holders.Nomad, log: slog.New(slog.DiscardHandler)}
	f.begin()
	f.write(inv, table(nil))
	if _, err := os.Stat(folder); err == nil {
		t.Error("the folder was created although no work has a GPU")
	}
	f.write(inv, table(map[int]use.Device{0: held(pod, side), 2: held(task), 3: held(bare)}))
	check.NoError(t, os.WriteFile(filepath.Join(folder, "1"), []byte("of Slurm\n"), 0o600), os.WriteFile(filepath.Join(folder, "7"), []byte("of Slurm\n"), 0o600))
	files(t, folder, map[string]string{"0": "default/one\n", "2": allocID + "\nbatch/train/" + allocID + "\n", "1": "of Slurm\n", "7": "of Slurm\n", ".tandem-nomad": "0\n2\n"})

	// The agent is killed. The next one removes what it left, and nothing else.
	f = jobFiles{folder: folder, orchestrator: holders.Nomad, log: slog.New(slog.DiscardHandler)}
	f.begin()
	files(t, folder, map[string]string{"1": "of Slurm\n", "7": "of Slurm\n", ".tandem-nomad": "0\n2\n"})
	f.write(inv, table(map[int]use.Device{0: held(task)}))
	files(t, folder, map[string]string{"0": "batch/train/" + allocID + "\n", "1": "of Slurm\n", "7": "of Slurm\n", ".tandem-nomad": "0\n"})

	// An agent that ended later removes them. They are written again.
	late := jobFiles{folder: folder, orchestrator: holders.Nomad, log: f.log, written: map[string]string{"0": "", "2": ""}}
	late.end()
	files(t, folder, map[string]string{"1": "of Slurm\n", "7": "of Slurm\n"})
	f.write(inv, table(map[int]use.Device{0: held(task)}))
	files(t, folder, map[string]string{"0": "batch/train/" + allocID + "\n", "1": "of Slurm\n", "7": "of Slurm\n", ".tandem-nomad": "0\n"})
	// Another process removes the file, and then the folder, while the work goes on.
	check.NoError(t, os.Remove(filepath.Join(folder, "0")))
	f.write(inv, table(map[int]use.Device{0: held(task)}))
	files(t, folder, map[string]string{"0": "batch/train/" + allocID + "\n", "1": "of Slurm\n", "7": "of Slurm\n", ".tandem-nomad": "0\n"})
	check.NoError(t, os.Rename(folder, folder+".old"))
	f.write(inv, table(map[int]use.Device{0: held(task)}))
	files(t, folder, map[string]string{"0": "batch/train/" + allocID + "\n", ".tandem-nomad": "0\n"})
	check.NoError(t, os.RemoveAll(folder), os.Rename(folder+".old", folder))
	f.end()
	files(t, folder, map[string]string{"1": "of Slurm\n", "7": "of Slurm\n"})
}

func files(t *testing.T, folder string, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	entries, err := os.ReadDir(folder)
	check.NoError(t, err)
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(folder, e.Name()))
		check.NoError(t, err)
		got[e.Name()] = string(text)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
