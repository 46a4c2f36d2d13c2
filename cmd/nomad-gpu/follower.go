package main

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/sources"
)

// agentName names the plugin's files in the state directory.
const agentName = "nomad-gpu"

// partAtMost is how long the process stays for its last word on disk. After two seconds Nomad would
// kill it.
const partAtMost = time.Second

// follower follows the machine with one monitor at a time: a process has one NVML.
type follower struct {
	began  time.Time // of the process
	end    context.CancelCauseFunc
	orders chan os.Signal // quiesce and resume

	mu      sync.Mutex
	latest  *monitor.Monitor
	last    <-chan struct{}   // closed when the latest monitor has ended; nil before the first
	parting []<-chan struct{} // each closed when nothing of a monitor's is under way on disk any more
}

func newFollower(end context.CancelCauseFunc) *follower {
	return &follower{began: time.Now(), end: end, orders: make(chan os.Signal, 4)}
}

// order passes on a signal to the monitor. A plugin that is disabled has none, and nothing to leave alone.
func (f *follower) order(s os.Signal) {
	select {
	case f.orders <- s:
	default:
	}
}

// start is a nomadadapter.StartFunc.
func (f *follower) start(ctx context.Context, s nomadadapter.Settings, log *slog.Logger) nomadadapter.Source {
	from := sources.Open(s.Health, s.Core, s.MPSRoot, agentName, log)
	store := from.Store()
	kept := make(chan struct{})
	if store != nil {
		store = &diary{Store: store, over: ctx.Done(), closed: kept}
	} else {
		close(kept)
	}
	m := monitor.New(opener(s.Core.Roots), s.Core, log, store)
	m.SetDriverProbe(func() string { return nvidia.DriverFingerprint(s.Core.Roots) })
	m.AwaitLog() // from.Follow reports it
	ended, parted := make(chan struct{}), make(chan struct{})
	f.mu.Lock()
	before := f.last
	f.last, f.latest, f.parting = ended, m, append(f.parting, parted)
	f.mu.Unlock()

	go from.Follow(ctx, m)
	left := make(chan struct{}) // what is claimed in the state directory
	go func() {
		defer close(left)
		from.Host().Run(ctx, m)
	}()
	go control.Follow(ctx, f.orders, m, log)
	go func() {
		if err := m.Watchdog().Watch(ctx, log, monitor.TaskName); err != nil {
			f.giveUp(ctx, log, err)
		}
	}()
	go func() {
		defer close(parted)
		socket := control.NewSocket(socketPath(s.Health.StateDir))
		notes := func() []string { return slices.Concat(from.Warnings(), socket.Warnings()) }
		socket.Serve(ctx, m, control.Options{Config: s.Core, Simulation: s.Health.Simulation, Warnings: notes, Log: log})
		<-kept
		<-left
	}()
	go func() {
		defer close(ended)
		if before != nil {
			<-before
		}
		from.Host().AwaitFirst(ctx)
		if err := m.Run(ctx); err != nil {
			f.giveUp(ctx, log, err)
		}
	}()
	return m
}

// part waits until what was started has written its last and removed its socket, and until kept is closed: then the
// plugin has written its last, too. A disk can hang.
func (f *follower) part(kept <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	enough := time.After(partAtMost)
	for _, parted := range append(f.parting, kept) {
		select {
		case <-parted:
		case <-enough:
			return
		}
	}
}

// onHangup has the machine read now: the configuration comes from Nomad, and there is no other to read again.
func (f *follower) onHangup(log hclog.Logger) {
	log.Info("SIGHUP: the machine is read again; a changed plugin block needs an agent restart")
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.latest != nil {
		f.latest.Report(core.Observation{At: core.Node, Detail: "SIGHUP"})
	}
}

// giveUp ends the process, as a new one is needed, which Nomad starts at once. There is nothing to wait for:
// the agent has this line of the log even after our end, and to hold on to a driver that is of no use only
// makes reservations fail that the next process grants.
func (f *follower) giveUp(ctx context.Context, log *slog.Logger, err error) {
	pause := linger(time.Since(f.began))
	log.Error("a new process is needed", "error", err, "exit_in", pause)
	select {
	case <-time.After(pause):
		f.end(err)
	case <-ctx.Done():
	}
}

// linger is how long a process that has lived for age shall stay. One that is of no use from the start stays
// for some seconds, as the next may find what this one found and Nomad makes no pause.
func linger(age time.Duration) time.Duration { return max(5*time.Second-age, 0) }

// diary is a store that closes a channel when it was written after the end.
type diary struct {
	monitor.Store
	over   <-chan struct{} // closed at the end
	closed chan struct{}
	once   sync.Once
}

// Save is monitor.Store's.
func (d *diary) Save(r core.Checkpoint) error {
	last := false
	select {
	case <-d.over:
		last = true
	default:
	}
	err := d.Store.Save(r)
	if last {
		d.once.Do(func() { close(d.closed) })
	}
	return err
}

func socketPath(stateDir string) string { return control.Path(stateDir, agentName) }
