package agent

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/test/check"
)

// What proofs are decided by follows from the state and the table of use.
func TestSeen(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Now()
	fault := health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.XID, Code: 95}
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(5), fault).ProofFailed(cfg, now, coretest.GPU(3), health.ProofFailure{State: health.Unhealthy})
	s = s.WithHost(cfg, now, inventory.Host{Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{
		{GPU: coretest.GPU(0), API: inventory.Nomad, Local: true, Pending: "to dra"},
		{GPU: coretest.GPU(1), API: inventory.Nomad, Local: true, Taken: inventory.Proof},
		{GPU: coretest.GPU(4), API: inventory.DRA},
	}}})
	process := []use.Process{{Process: gpu.Process{PID: 7}}}
	table := use.Table{At: now, HoldersKnown: true, Devices: []use.Device{
		{ID: coretest.GPU(0), Processes: []use.Process{}, Holders: []holders.Holder{{Work: holders.Work{Namespace: "default", Name: "train"}}}},
		{ID: coretest.GPU(1), Processes: process},
		{ID: coretest.GPU(2), Processes: process},
		{ID: coretest.GPU(3)},
	}}
	n := seen(s, table, cfg.Health.Mode, proof.Node{Name: "n"})
	if n.Name != "n" || n.Cancel != "" || len(n.GPUs) != 4 {
		t.Fatalf("%+v", n)
	}
	of := func(i int) proof.GPU { return n.GPUs[i] }
	if g := of(0); g.Cancel != proof.Move || !slices.Equal(g.Holders, []string{"pod default/train"}) || !slices.Equal(g.Pools, []string{"gpu"}) || g.Unread != "" {
		t.Errorf("it moves, and work has it: %+v", g)
	}
	if g := of(1); len(g.Processes) != 0 || g.Health != health.Healthy {
		t.Errorf("its proof runs: %+v", g)
	}
	if g := of(2); g.Health != health.Unhealthy || g.Cause != "XID_95" || !slices.Equal(g.Processes, []string{"pid 7"}) {
		t.Errorf("with a fault: %+v", g)
	}
	if g := of(3); g.Health != health.Healthy || !strings.Contains(g.Unread, "processes") {
		t.Errorf("it failed its proof, and its processes are not known: %+v", g)
	}

	if n := seen(s, use.Table{}, cfg.Health.Mode, proof.Node{}); of(0).Unread != "" || n.GPUs[0].Unread == "" || n.GPUs[0].Never {
		t.Errorf("nothing is read yet: %+v", n.GPUs[0])
	}
	table.HoldersKnown, table.Unknown = false, use.Unknown{Reason: "no token", Remedy: "set nomad_token_file"}
	if g := seen(s, table, cfg.Health.Mode, proof.Node{}).GPUs[0]; g.Unread != "no token: set nomad_token_file" || !g.Never {
		t.Errorf("a setting is missing: %+v", g)
	}
	gone := core.NewState(cfg).Read(cfg, now, gpu.NoDriver(gpu.DriverAbsent, "no library"))
	if n := seen(gone, table, cfg.Health.Mode, proof.Node{}); n.Cancel != proof.Maintenance {
		t.Errorf("without a driver: %+v", n)
	}
}

// Only a GPU whose latest proof it passed has a day, in UTC.
func TestPassed(t *testing.T) {
	at := time.Date(2026, 11, 27, 23, 30, 0, 0, time.FixedZone("", -3600))
	s := proof.State{Records: []proof.Record{
		{GPU: "GPU-1", Last: &proof.Verdict{Passed: true, At: at}}, {GPU: "GPU-2", Last: &proof.Verdict{At: at}}, {GPU: "GPU-3"},
	}}
	if on := proofsOf(proof.Node{}, nil, s).Passed; len(on) != 1 || on["GPU-1"] != "2026-11-28" {
		t.Errorf("%v", on)
	}
}

// A GPU that waits for a proof since the boot takes no work from the first moment on, and adapters show it only when that is known.
func TestNotProvedFromTheBeginning(t *testing.T) {
	folder, proc := t.TempDir(), t.TempDir()
	check.NoError(t, os.MkdirAll(proc+"/sys/kernel/random", 0o700))
	check.NoError(t, os.WriteFile(proc+"/sys/kernel/random/boot_id", []byte("5f3c\n"), 0o600))
	synctest.Test(t, func(t *testing.T) {
		o := options(config.Health{StateDir: folder}, core.DefaultConfig())
		o.Core.Roots.Proc, o.Core.Occupancy = proc, inventory.OccupancyReport
		o.Open = coretest.NewMachine(coretest.GPUs(2)).Open
		o.Prove = proof.Default()
		o.Prove.Command, o.Prove.Withhold = []string{"/check"}, true
		ctx, cancel := context.WithCancel(t.Context())
		a, done := New(o), make(chan struct{})
		go func() { defer close(done); _ = a.Run(ctx) }()
		defer func() { cancel(); <-done }()
		for inv := range a.Watch(ctx) {
			for u := range inv.Units() {
				if u.Health.Schedulable() {
					t.Errorf("%s takes work, provisional %t", u.ID, inv.Provisional())
				}
			}
			if inv.Len() == 2 && !inv.Provisional() {
				break
			}
		}
		for u := range a.Current().Units() {
			if text := u.Health.String(); !strings.Contains(text, "since the boot") {
				t.Errorf("%s: %s", u.ID, text)
			}
		}
	})
}

// An agent proves no GPU while the agent before it ends its proofs, and sets no limit while that ends its own: both have the same records.
func TestAgentBefore(t *testing.T) {
	for name, c := range map[string]struct {
		ends func(o *Options, earlier <-chan struct{})
		done func(*Agent) <-chan struct{}
	}{
		"proofs": {func(o *Options, earlier <-chan struct{}) { o.Earlier = earlier }, (*Agent).ProofsDone},  // a command that ignores SIGTERM
		"limits": {func(o *Options, earlier <-chan struct{}) { o.Recorded = earlier }, (*Agent).LimitsDone}, // a disk that is slow
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			earlier, sup := make(chan struct{}), NewSupervisor(func(error) {})
			o := options(config.Health{}, core.DefaultConfig())
			o.Open = coretest.NewMachine(coretest.GPUs(1)).Open
			o.Adapter = func(*Agent) Adapter { return Adapter{} }
			c.ends(&o, earlier)
			first := sup.Start(ctx, o)
			second := sup.Start(ctx, o)
			cancel()
			time.Sleep(time.Minute)
			for _, a := range []*Agent{first, second} {
				select {
				case <-c.done(a):
					t.Errorf("%s: nothing is done any more, as if the earlier one had ended", name)
				default:
				}
			}
			close(earlier)
			<-c.done(second)
		})
	}
}

// While any agent of the node has the driver released for a reset, no proof runs or begins: one that waits for its GPU is cancelled, and has not failed to run.
func TestSeenDuringAReset(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Now()
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(2))
	s = s.WithHost(cfg, now, inventory.Host{Ownership: inventory.Ownership{DriverReleased: coretest.GPU(1)}})
	if n := seen(s, use.Table{}, cfg.Health.Mode, proof.Node{}); n.Cancel != proof.Resetting {
		t.Errorf("%+v", n)
	}
}
