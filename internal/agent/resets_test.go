package agent

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/test/check"
)

// driver is a simulated driver that reports recovery actions and no processes, and the nvidia-smi that resets its GPUs.
type driver struct {
	*coretest.Machine

	mu     sync.Mutex
	action map[gpu.DeviceID]health.RecoveryAction
	heals  bool // a reset ends the fault
	resets []string
	hold   chan struct{} // nil = a reset takes a second
}

func (d *driver) open() (monitor.Session, error) {
	s, err := d.Open()
	if err != nil {
		return nil, err
	}
	return session{s, d}, nil
}

type session struct {
	monitor.Session
	driver *driver
}

func (s session) Probe() ([]health.Observation, error) {
	all, err := s.Session.Probe()
	s.driver.mu.Lock()
	defer s.driver.mu.Unlock()
	for i := range all {
		all[i].Sample.RecoveryAction = max(s.driver.action[all[i].At.GPU], health.RecoveryNone)
	}
	return all, err
}

func (s session) Usage() ([]gpu.Usage, error) {
	all, err := s.Session.Usage()
	for i := range all {
		all[i].Processes = &[]gpu.Process{}
	}
	return all, err
}

// fault is an XID after which the driver asks for a reset.
func (d *driver) fault(id gpu.DeviceID) {
	d.mu.Lock()
	d.action[id] = health.RecoveryReset
	d.mu.Unlock()
	d.SendEvent(health.Observation{At: gpu.WholeGPU(id), Kind: health.XID, Code: 95})
}

func (d *driver) Ready(context.Context) error { return nil }

func (d *driver) Look(context.Context, gpureset.Target) (look gpureset.Look, _ error) {
	if d.Sessions() > 0 {
		look.Clients = []gpureset.Client{{PID: os.Getpid(), Name: "agent"}}
	}
	return look, nil
}

func (d *driver) Reset(_ context.Context, t gpureset.Target) error {
	if look, _ := d.Look(context.Background(), t); len(look.Clients) > 0 {
		return &gpureset.InUseError{GPU: t.GPU, Clients: look.Clients}
	}
	d.mu.Lock()
	hold := d.hold
	d.resets = append(d.resets, string(t.GPU))
	if d.heals {
		delete(d.action, t.GPU)
	}
	d.mu.Unlock()
	if hold != nil {
		<-hold
	} else {
		time.Sleep(time.Second)
	}
	return nil
}

func (d *driver) Restore(context.Context, gpu.DeviceID) error { return nil }

func (d *driver) called() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.resets)
}

// resetAgent composes an agent of two GPUs that nothing uses, which resets by a policy. It has no control socket: that would stop the fake time.
func resetAgent(t *testing.T, dir string, d *driver, change ...func(*Options)) *Agent {
	t.Helper()
	cfg := core.DefaultConfig()
	cfg.Occupancy, cfg.Roots.Proc, cfg.API = inventory.OccupancyReport, filepath.Join(dir, "proc"), inventory.Nomad
	o := options(config.Health{StateDir: dir}, cfg)
	o.Name = "nomad-gpu"
	o.Open, o.Resetter, o.Reset = d.open, d, reset.Policy{Mode: reset.Act, Attempts: 2}
	record := func() holders.Record { return holders.Record{Complete: true, First: true} }
	o.Adapter = func(*Agent) Adapter {
		return Adapter{
			APIs: []inventory.API{inventory.Nomad}, Readers: ownership.Readers{inventory.Nomad: record},
			Holders: func(context.Context, *inventory.Allocatable) (holders.Record, error) { return record(), nil },
		}
	}
	for _, c := range change {
		c(&o)
	}
	a := New(o)
	own := ownershipOptions(o)
	own.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, syscall.EMFILE } // its goroutine would stop the fake time
	a.sources.host.agents = ownership.New(own)
	a.sources.host.agents.Serve(a.adapter.APIs, a.adapter.Readers)
	return a
}

// resetDir is a state directory whose control sockets would have too long a path, with a procfs of a booted node.
func resetDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), strings.Repeat("long", 30))
	boot := filepath.Join(dir, "proc/sys/kernel/random/boot_id") // without /proc/uptime, of which the time would pass
	check.NoError(t, os.MkdirAll(filepath.Dir(boot), 0o700))
	check.NoError(t, os.WriteFile(boot, []byte("b1\n"), 0o600))
	return dir
}

func newDriver() *driver {
	return &driver{Machine: coretest.NewMachine(coretest.GPUs(2)), action: map[gpu.DeviceID]health.RecoveryAction{}, heals: true}
}

// run runs an agent until stop is called.
func run(t *testing.T, a *Agent) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := a.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	return func() { cancel(); <-ended }
}

// takesWork reports whether the units of a GPU take work.
func takesWork(a *Agent, id gpu.DeviceID) bool {
	for u := range a.Current().Units() {
		if u.Device.At.GPU == id && !u.Health.Schedulable() {
			return false
		}
	}
	return true
}

// until waits for something for some time.
func until(t *testing.T, a *Agent, what string, most time.Duration, ok func() bool) time.Duration {
	t.Helper()
	for began := time.Now(); ; time.Sleep(time.Second) {
		if took := time.Since(began); ok() {
			return took
		} else if took > most {
			t.Fatalf("after %v: not so far: %s; %+v, %v", took, what, a.Resets(), a.Problems())
		}
	}
}

// The whole way on one node: XID 95 on a free GPU, the driver asks for a reset, the GPU is reset, it is healthy by the evidence, its proof passes, and it
// takes work again. The other GPU is not lost meanwhile.
func TestResetOfAFaultyGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDriver()
		a := resetAgent(t, resetDir(t), d, func(o *Options) {
			o.Prove = proof.Default()
			o.Prove.Command, o.Prove.At = []string{"/bin/true"}, []proof.Reason{proof.Reset}
		})
		stop := run(t, a)
		defer stop()
		sick, other := coretest.GPU(0), coretest.GPU(1)
		until(t, a, "both take work", time.Minute, func() bool { return takesWork(a, sick) && takesWork(a, other) && len(a.Current().GPUs()) == 2 })
		d.fault(sick)
		until(t, a, "it takes no work", time.Minute, func() bool { return !takesWork(a, sick) })
		took := until(t, a, "it is reset", 2*time.Minute, func() bool { return d.called() == 1 })
		t.Logf("reset after %v", took)
		took = until(t, a, "the other GPU takes work", time.Minute, func() bool { return takesWork(a, other) && d.Sessions() == 1 })
		t.Logf("the other one takes work after %v", took)
		took = until(t, a, "it takes work", 20*time.Minute, func() bool { return takesWork(a, sick) })
		t.Logf("it takes work after %v", took)
		took = until(t, a, "it is proved", 20*time.Minute, func() bool {
			r, _ := a.Proofs().State.Of(sick)
			return r.Last != nil && r.Last.Passed && r.Last.Reason == proof.Reset
		})
		t.Logf("proved after %v", took)
		time.Sleep(time.Hour)
		if r, _ := a.Resets().State.Of(sick); d.called() != 1 || r.Last == nil || r.Last.Outcome != reset.Done || r.Attempts != 0 || !takesWork(a, sick) {
			t.Errorf("%d resets, %+v", d.called(), r)
		}
	})
}

// case 19: a fault that outlasts two resets waits for a person.
func TestResetWithoutEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDriver()
		d.heals = false
		a := resetAgent(t, resetDir(t), d)
		stop := run(t, a)
		defer stop()
		time.Sleep(time.Minute)
		d.fault(coretest.GPU(0))
		until(t, a, "two resets", 10*time.Minute, func() bool { return d.called() == 2 })
		time.Sleep(time.Hour)
		all := a.Resets().Waits
		if d.called() != 2 || len(all) != 1 || all[0].Code != reset.WaitAttempts || !takesWork(a, coretest.GPU(1)) || takesWork(a, coretest.GPU(0)) {
			t.Errorf("%d resets, %+v", d.called(), all)
		}
	})
}

// A reload does not end a reset that has begun: the agent goes on until that has ended. The end of the process does not wait for it.
func TestEndDuringAReset(t *testing.T) {
	for _, process := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			d, ending := newDriver(), make(chan struct{})
			d.hold = make(chan struct{})
			dir := resetDir(t)
			a := resetAgent(t, dir, d, func(o *Options) { o.Ending = ending })
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- a.Run(ctx) }()
			time.Sleep(time.Minute)
			d.fault(coretest.GPU(0))
			until(t, a, "nvidia-smi is called", 2*time.Minute, func() bool { return d.called() == 1 })
			if !a.Resetting() {
				t.Error("no reset runs")
			}
			if process {
				close(ending)
			}
			cancel()
			time.Sleep(20 * time.Second)
			mark, _ := os.ReadFile(filepath.Join(dir, ownership.FolderName, "ownership.json"))
			select {
			case <-a.MonitorDone():
				if !process {
					t.Error("the monitor has ended, and would open the driver in the next run")
				}
			default:
				if process {
					t.Error("the process waits for the reset")
				}
			}
			close(d.hold)
			check.NoError(t, <-ended)
			time.Sleep(2 * time.Minute) // a process would have ended; the monitor reads nothing any more
			if r, _ := a.Resets().State.Of(coretest.GPU(0)); r.Running != nil || r.Last.Outcome != reset.Done {
				t.Errorf("process ends %t: %+v, %s", process, r, mark)
			}
		})
	}
}

// With the mode off an agent has the same goroutines and files; the command of a person works, and leaves a record only.
func TestResetOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		count := func(mode reset.Mode) (goroutines int, files []string) {
			dir := resetDir(t)
			a := resetAgent(t, dir, newDriver(), func(o *Options) { o.Reset.Mode = mode })
			stop := run(t, a)
			time.Sleep(time.Minute)
			synctest.Wait()
			goroutines = runtime.NumGoroutine()
			if mode == reset.Off && (a.Resets() != nil || len(a.Problems()) != 1) { // the path of the control socket is too long
				t.Errorf("%+v, %v", a.Resets(), a.Problems())
			}
			stop()
			entries, _ := os.ReadDir(dir)
			for _, e := range entries {
				files = append(files, e.Name())
			}
			return goroutines, files
		}
		without, files := count(reset.Off)
		with, _ := count(reset.Act)
		if slices.ContainsFunc(files, func(name string) bool { return strings.Contains(name, "reset") }) || without != with-1 {
			t.Errorf("%d goroutines with off, %d with act; files %v", without, with, files)
		}
	})
}

// What resets are decided by follows from the state and the table of use.
func TestSeenFaults(t *testing.T) {
	cfg, now := core.DefaultConfig(), time.Now()
	snapshot := coretest.WithMIG(coretest.GPUs(5), 4, "1g.10gb", "1g.10gb")
	for i := range snapshot.Links {
		if l := &snapshot.Links[i]; l.A != coretest.GPU(0) || l.B != coretest.GPU(2) {
			l.NVLinks = 0
		}
	}
	cfg.MIG = inventory.MIGMixed
	fault := health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.XID, Code: 95}
	checked := health.Observation{At: gpu.WholeGPU(coretest.GPU(2)), Kind: health.Checked, Sample: health.Sample{RecoveryAction: health.RecoveryDrainAndReset}}
	s := core.NewState(cfg).Read(cfg, now, snapshot, fault, checked).ProofFailed(cfg, now, coretest.GPU(3), health.ProofFailure{State: health.Unhealthy, Service: true})
	decided := &inventory.Proofs{Withheld: map[gpu.DeviceID]string{coretest.GPU(0): "since the boot"}}
	for i := 1; i < 6; i++ {
		decided.Withheld[coretest.GPU(i)] = ""
	}
	host := inventory.Host{Proofs: decided, Ownership: inventory.Ownership{GPUs: []inventory.GPUOwner{
		{GPU: coretest.GPU(0), API: inventory.Nomad, Local: true, Pending: "to dra"},
		{GPU: coretest.GPU(1), API: inventory.DRA},
	}}}
	s = s.WithHost(cfg, now, host)
	table := use.Table{At: now, HoldersKnown: true, Devices: []use.Device{
		{ID: coretest.GPU(2), Processes: []use.Process{{Process: gpu.Process{PID: 7}}}, Holders: []holders.Holder{{Work: holders.Work{Namespace: "default", Name: "train"}}}},
	}}
	n := seenFaults(s, table, cfg.Health.Mode, reset.Node{}, "")
	if n.Paused != "" || len(n.GPUs) != 4 {
		t.Fatalf("%+v", n)
	}
	if g := n.GPUs[0]; g.Moving != "to dra" || g.TakesWork || !slices.Equal(g.Group, []gpu.DeviceID{coretest.GPU(2)}) || g.Unread == "" {
		t.Errorf("it moves, and waits for its proof: %+v", g)
	}
	if g := n.GPUs[1]; g.Action != health.RecoveryDrainAndReset || g.TakesWork || g.Cause == "" || len(g.Holders) != 1 || len(g.Processes) != 1 || g.MIG {
		t.Errorf("it has a fault, work and a process: %+v", g)
	}
	if g := n.GPUs[2]; !g.NeedsService || g.TakesWork {
		t.Errorf("it failed its proof: %+v", g)
	}
	if g := n.GPUs[3]; !g.MIG || !g.TakesWork || g.Cause != "" {
		t.Errorf("it is divided: %+v", g)
	}

	host.Ownership.GPUs[1].Taken = inventory.Reset
	if n := seenFaults(s.WithHost(cfg, now, host), table, cfg.Health.Mode, reset.Node{}, ""); !strings.Contains(n.Paused, "another agent") {
		t.Errorf("another agent has taken a GPU for its reset: %q", n.Paused)
	}
	host.Ownership.GPUs[1].Local = true
	if n := seenFaults(s.WithHost(cfg, now, host), table, cfg.Health.Mode, reset.Node{}, ""); !strings.Contains(n.Paused, "may still run") {
		t.Errorf("an earlier process of this agent was killed during a reset: %q", n.Paused)
	}
	if n := seenFaults(s.WithHost(cfg, now, host), table, cfg.Health.Mode, reset.Node{}, coretest.GPU(1)); n.Paused != "" {
		t.Errorf("this process resets it: %q", n.Paused)
	}
	host.Ownership.GPUs[1].Local = false
	host.Ownership.DriverReleased, host.Ownership.GPUs[1].Taken = coretest.GPU(2), ""
	released := s.WithHost(cfg, now, host)
	if n := seenFaults(released, table, cfg.Health.Mode, reset.Node{}, ""); !strings.Contains(n.Paused, "another agent") {
		t.Errorf("another agent has released the driver: %q", n.Paused)
	}
	if n := seenFaults(released, table, cfg.Health.Mode, reset.Node{}, coretest.GPU(2)); n.Paused != "" {
		t.Errorf("this agent has: %q", n.Paused)
	}
	gone := core.NewState(cfg).Read(cfg, now, gpu.NoDriver(gpu.DriverAbsent, "no library"))
	if n := seenFaults(gone, table, cfg.Health.Mode, reset.Node{}, ""); !strings.Contains(n.Paused, "no library") {
		t.Errorf("without a driver: %q", n.Paused)
	}
}

// An agent is known by its process, or by the name of its program.
func TestIsAgent(t *testing.T) {
	for name, want := range map[gpureset.Client]bool{
		{PID: os.Getpid(), Name: "anything"}: true, {PID: 1, Name: "k8s-gpu"}: true, {PID: 1, Name: "nomad-gpu"}: true, {PID: 1, Name: "dcgm-exporter"}: false,
	} {
		if got := (resetting{}).IsAgent(name); got != want {
			t.Errorf("%v: %t", name, got)
		}
	}
}
