package storm

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/node/history"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// agentVariable is set in a process that is one of two agents of a machine: each has an NVML and a limit of descriptors of its own, and
// can be killed.
const agentVariable = "TANDEM_STORM_AGENT"

func TestMain(m *testing.M) {
	if text := os.Getenv(agentVariable); text != "" {
		if err := runAgent(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// startOptions are what an agent process is started with.
type startOptions struct {
	Agent, StateDir, Root string
	Split                 split
	Ahead                 time.Duration // of its wall clock
	Full                  bool          // it can open no file
}

func (o startOptions) config() core.Config {
	cfg := agentConfig(o.Root)
	cfg.Rescan, cfg.Health.RemoveLostAfter = rescan/5, removeLostAfter
	cfg.Policy = o.Split.policy(o.Agent)
	return cfg
}

// message is a line that an agent process writes: an inventory, a line of its log, or an answer to a command.
type message struct {
	Offer  *offered `json:",omitempty"`
	Log    string   `json:",omitempty"`
	Answer string   `json:",omitempty"`
	Err    string   `json:",omitempty"`
}

// offered is a published inventory.
type offered struct {
	Ready        bool // the driver answers
	Unidentified bool // a GPU is listed whose UUID was not read
	Generation   int
	Numbers      map[gpu.DeviceID]gpu.DeviceIndex
	Units        []offeredUnit
}

type offeredUnit struct {
	ID          inventory.UnitID
	Device, GPU gpu.DeviceID
	Index       int // NVML's, of the GPU
	Pool        string
	Schedulable bool
	Health      string
}

// agentProcess is an agent in a process of its own: a monitor, a history and a node watcher, composed as the commands do.
type agentProcess struct {
	*monitor.Monitor
	options startOptions
	ahead   atomic.Int64 // nanoseconds
	files   fileLimit

	mu         sync.Mutex
	out        *json.Encoder
	sent       *inventory.Allocatable // last
	generation int                    // of the numbering that was sent last
}

// runAgent runs until its standard input ends, or a command ends it.
func runAgent(text string) error {
	p := &agentProcess{out: json.NewEncoder(os.Stdout)}
	if err := json.Unmarshal([]byte(text), &p.options); err != nil {
		return err
	}
	p.ahead.Store(int64(p.options.Ahead))
	if p.options.Full {
		p.files.set()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg := p.options.config()
	log := slog.New(slog.NewTextHandler(p, nil))
	kept := history.Open(p.options.StateDir, p.options.Agent, cfg.Roots.Proc, log)
	kept.SetWallClock(p.wall)
	boot, _ := history.BootID(cfg.Roots.Proc)
	watcher := ownership.New(ownership.Options{Agent: p.options.Agent, StateDir: p.options.StateDir, BootID: boot, Config: cfg, Log: log})
	p.Monitor = monitor.New(func() (monitor.Session, error) { return openDriver(cfg.Roots) }, cfg, log, kept)
	p.SetWallClock(p.wall)
	p.SetDriverProbe(func() string { return nvidia.DriverFingerprint(cfg.Roots) })
	var parts sync.WaitGroup
	var failed error
	parts.Go(func() { watcher.Run(ctx, p) })
	parts.Go(func() {
		watch.Await(ctx, watcher.First(), time.Second)
		failed = p.Run(ctx)
		cancel()
	})
	parts.Go(func() {
		for range p.Watch(ctx) {
			p.send()
		}
	})
	parts.Go(func() { // what matters is that nothing else waits for it
		every(ctx, 500*time.Millisecond, func() {
			short, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, _ = p.Usage(short)
		})
	})
	parts.Go(func() { every(ctx, 50*time.Millisecond, p.send) }) // a numbering may change although the inventory does not
	go p.runCommands(ctx, cancel)
	parts.Wait()
	return failed
}

// every calls f, with that pause, until ctx ends.
func every(ctx context.Context, pause time.Duration, f func()) {
	for watch.Sleep(ctx, pause) {
		f()
	}
}

func (p *agentProcess) wall() time.Time { return time.Now().Add(time.Duration(p.ahead.Load())) }

// Write handles a line of the log. The goroutine that publishes an inventory with another device or pool logs it: so each of them is
// sent, while Watch may skip some.
func (p *agentProcess) Write(line []byte) (int, error) {
	if p.Monitor != nil {
		p.send()
	}
	_, text, _ := strings.Cut(string(line), " level=")
	p.write(message{Log: strings.TrimSpace(text)})
	return len(line), nil
}

// send writes the inventory if it has changed.
func (p *agentProcess) send() {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.State()
	inv, numbering := state.Allocatable, state.Binding.Numbering
	if inv == p.sent && numbering.Generation == p.generation {
		return
	}
	p.sent, p.generation = inv, numbering.Generation
	o := &offered{Ready: inv.Driver().State == gpu.DriverReady, Generation: numbering.Generation, Numbers: map[gpu.DeviceID]gpu.DeviceIndex{}}
	for _, n := range numbering.Numbers {
		o.Numbers[n.ID] = n.Index
	}
	for _, e := range inv.Excluded() {
		o.Unidentified = o.Unidentified || e.At.GPU == ""
	}
	for u := range inv.Units() {
		if u.Health.Reason == health.ReasonWithdrawn { // listed for a moment, but not offered
			continue
		}
		o.Units = append(o.Units, offeredUnit{
			ID: u.ID, Device: u.Device.ID, GPU: u.Device.At.GPU, Index: u.Device.Index,
			Pool: u.Pool, Schedulable: u.Health.Schedulable(), Health: u.Health.String(),
		})
	}
	_ = p.out.Encode(message{Offer: o}) // it fails if the test has ended
}

func (p *agentProcess) write(m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.out.Encode(m)
}

// runCommands executes the commands on standard input, one a line. At its end the process ends.
func (p *agentProcess) runCommands(ctx context.Context, end func()) {
	defer end()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		answer := message{Answer: verb}
		if err := p.runCommand(ctx, verb, rest); err != nil {
			answer.Err = err.Error()
		}
		p.write(answer)
	}
}

func (p *agentProcess) runCommand(ctx context.Context, verb, rest string) error {
	switch verb {
	case "full":
		p.files.set()
	case "free":
		p.files.reset()
	case "ahead":
		d, err := time.ParseDuration(rest)
		p.ahead.Store(int64(d))
		return err
	case "rebind":
		_, _, err := p.Rebind(ctx)
		return err
	case "save":
		return p.Save(ctx)
	case "split":
		o := p.options
		if err := json.Unmarshal([]byte(rest), &o.Split); err != nil {
			return err
		}
		return p.ApplyPolicy(ctx, o.config())
	default:
		return fmt.Errorf("unknown command %q", verb)
	}
	return nil
}

// fileLimit makes every attempt of this process to open a file fail with EMFILE, as after a leak: no descriptor above the standard
// streams is available. Open files stay usable.
type fileLimit struct{ before syscall.Rlimit }

func (l *fileLimit) set() {
	if l.before.Cur == 0 && syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l.before) == nil {
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: l.before.Max}) // lowering it does not fail
	}
}

func (l *fileLimit) reset() {
	if l.before.Cur != 0 {
		_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &l.before)
		l.before.Cur = 0
	}
}
