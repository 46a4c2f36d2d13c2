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
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/checkpoint"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
)

// asAgent is set in a process that is one of two agents of a machine: a process has one NVML, a limit of descriptors and a
// death of its own.
const asAgent = "TANDEM_STORM_AGENT"

func TestMain(m *testing.M) {
	if text := os.Getenv(asAgent); text != "" {
		if err := runAgent(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// orders are what an agent process is started with.
type orders struct {
	Agent, StateDir, Root string
	Split                 split
	Ahead                 time.Duration // how far its wall clock is ahead
	Full                  bool          // it starts with a full descriptor table
}

// report is a line that an agent process writes: an inventory, a line of its log, or an answer to a command.
type report struct {
	Offer  *offered `json:",omitempty"`
	Log    string   `json:",omitempty"`
	Answer string   `json:",omitempty"`
	Err    string   `json:",omitempty"`
}

// offered is a published inventory.
type offered struct {
	Ready      bool // the driver answers
	Nameless   bool // a GPU is listed that does not say its UUID
	Generation int
	Numbers    map[gpu.DeviceID]gpu.DeviceIndex
	Units      []offeredUnit
}

type offeredUnit struct {
	ID          inventory.UnitID
	Device, GPU gpu.DeviceID
	Index       int // the driver's own, of the GPU
	Pool        string
	Well        bool // it takes new work
	Health      string
}

// process is an agent in a process of its own: a monitor, a history and a watcher of the host, put together as the commands do.
type process struct {
	*monitor.Monitor
	orders orders
	ahead  atomic.Int64 // nanoseconds
	table  table

	mu   sync.Mutex
	out  *json.Encoder
	last *inventory.Inventory
	told int // generation of the numbering that was told last
}

// runAgent runs until its standard input ends, or a command ends it.
func runAgent(text string) error {
	p := &process{out: json.NewEncoder(os.Stdout)}
	if err := json.Unmarshal([]byte(text), &p.orders); err != nil {
		return err
	}
	p.ahead.Store(int64(p.orders.Ahead))
	if p.orders.Full {
		p.table.fill()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg := pairConfig(p.orders)
	log := slog.New(slog.NewTextHandler(p, nil))
	history := checkpoint.Open(p.orders.StateDir, p.orders.Agent, cfg.Roots.Proc, log)
	history.SetWallClock(p.wall)
	boot, _ := checkpoint.BootID(cfg.Roots.Proc)
	watcher := hostwatch.New(hostwatch.Options{Agent: p.orders.Agent, StateDir: p.orders.StateDir, BootID: boot, Config: cfg, Log: log})
	p.Monitor = monitor.New(func() (monitor.Session, error) {
		s, err := nvidia.Open(nvidia.Options{Roots: cfg.Roots, Deadline: patience, Slow: time.Second, Fabric: time.Second, Links: 2 * time.Second})
		if err != nil {
			return nil, err // not s: a nil *Session would be a Session
		}
		return s, nil
	}, cfg, log, history)
	p.SetWallClock(p.wall)
	p.SetDriverProbe(func() string { return nvidia.DriverFingerprint(cfg.Roots) })
	var parts sync.WaitGroup
	var failed error
	parts.Go(func() { watcher.Run(ctx, p) })
	parts.Go(func() {
		watcher.AwaitFirst(ctx)
		failed = p.Run(ctx)
		cancel()
	})
	parts.Go(func() {
		for range p.Watch(ctx) {
			p.tell()
		}
	})
	parts.Go(func() { p.askNumbers(ctx) })
	parts.Go(func() { // a numbering may change and mean the same
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				p.tell()
			case <-ctx.Done():
				return
			}
		}
	})
	go p.obey(ctx, cancel)
	parts.Wait()
	return failed
}

// wall is the wall clock.
func (p *process) wall() time.Time { return time.Now().Add(time.Duration(p.ahead.Load())) }

// Write takes a line of the log. Each inventory with another device or pool is logged when it is published, by the goroutine
// that publishes: so each is told of, where Watch may skip some.
func (p *process) Write(line []byte) (int, error) {
	if p.Monitor != nil {
		p.tell()
	}
	_, text, _ := strings.Cut(string(line), " level=")
	p.write(report{Log: strings.TrimSpace(text)})
	return len(line), nil
}

// tell writes the inventory, if it is another one.
func (p *process) tell() {
	p.mu.Lock()
	defer p.mu.Unlock()
	state := p.State()
	inv := state.Inventory
	n := state.Binding.Numbering
	if inv == p.last && n.Generation == p.told {
		return
	}
	p.last, p.told = inv, n.Generation
	o := &offered{Ready: inv.Driver().State == gpu.DriverReady, Generation: n.Generation, Numbers: map[gpu.DeviceID]gpu.DeviceIndex{}}
	for _, each := range n.Numbers {
		o.Numbers[each.ID] = each.Index
	}
	for _, e := range inv.Excluded() {
		o.Nameless = o.Nameless || e.At.GPU == ""
	}
	for u := range inv.Units() {
		if u.Health.Reason == health.ReasonWithdrawn { // listed for a moment, and not offered any more
			continue
		}
		o.Units = append(o.Units, offeredUnit{
			ID: u.ID, Device: u.Device.ID, GPU: u.Device.At.GPU, Index: u.Device.Index,
			Pool: u.Pool, Well: u.Health.Schedulable(), Health: u.Health.String(),
		})
	}
	_ = p.out.Encode(report{Offer: o}) // the test has ended, if it fails
}

func (p *process) write(r report) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = p.out.Encode(r)
}

// askNumbers reads the live numbers as a stream of statistics does.
func (p *process) askNumbers(ctx context.Context) {
	for ctx.Err() == nil {
		short, cancel := context.WithTimeout(ctx, time.Second)
		_, _ = p.Usage(short) // what matters is that nothing else waits for it
		cancel()
		select {
		case <-time.After(500 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// obey does what standard input asks for, a command in each line. At its end the process ends.
func (p *process) obey(ctx context.Context, end func()) {
	defer end()
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		verb, rest, _ := strings.Cut(lines.Text(), " ")
		var err error
		switch verb {
		case "end":
			return
		case "full":
			p.table.fill()
		case "free":
			p.table.free()
		case "ahead":
			var d time.Duration
			d, err = time.ParseDuration(rest)
			p.ahead.Store(int64(d))
		case "rebind":
			_, _, err = p.Rebind(ctx)
		case "keep":
			err = p.Save(ctx)
		case "split":
			var s split
			if err = json.Unmarshal([]byte(rest), &s); err == nil {
				o := p.orders
				o.Split = s
				err = p.ApplyPolicy(ctx, pairConfig(o))
			}
		default:
			err = fmt.Errorf("unknown command %q", verb)
		}
		answer := report{Answer: verb}
		if err != nil {
			answer.Err = err.Error()
		}
		p.write(answer)
	}
}
