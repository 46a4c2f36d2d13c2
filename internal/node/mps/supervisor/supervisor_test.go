package supervisor

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
)

func TestMain(m *testing.M) {
	mpscontrol.Main() // when it is called as a program of the driver
	os.Exit(m.Run())
}

// host is a node with the programs of the driver, and supervisors on it.
type host struct {
	*testing.T
	root, programs string
	log            *logbuffer.Buffer

	mu    sync.Mutex
	pools []Pool
	other []Pool // of another agent; nil = there is none
	held  []gpu.DeviceID
	taken map[gpu.DeviceID]string
	err   error
}

func newHost(t *testing.T) *host {
	t.Helper()
	h := &host{T: t, root: coretest.ShortDir(t), programs: t.TempDir(), log: &logbuffer.Buffer{}}
	self, err := os.Executable()
	check.NoError(t, err)
	check.NoError(t, mpscontrol.Install(h.programs, self))
	t.Setenv("PATH", h.programs)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // else each program sleeps for a second before it ends
	t.Cleanup(func() {
		all, _ := filepath.Glob(filepath.Join(h.root, inventory.ResourceDomain, "*", "pipe"))
		for _, pipe := range all {
			if p, found := findDaemon(pipe); found {
				_ = p.signal(syscall.SIGKILL) // it may have ended meanwhile
			}
		}
	})
	return h
}

// offer sets what the agent offers; with an error it does not answer.
func (h *host) offer(err error, pools ...Pool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.pools, h.err = pools, err
}

func (h *host) supervisor() *Supervisor {
	s := New(Options{Root: h.root, StateDir: h.state(), Lock: filepath.Join(h.state(), "lock"), Log: slog.New(slog.NewTextHandler(h.log, nil)),
		Offers: map[string]func(context.Context) (Offer, error){
			"k8s-gpu": func(context.Context) (Offer, error) {
				h.mu.Lock()
				defer h.mu.Unlock()
				return Offer{Pools: h.pools, Held: h.held}, h.err
			},
			"nomad-gpu": func(context.Context) (Offer, error) {
				h.mu.Lock()
				defer h.mu.Unlock()
				if h.other == nil {
					return Offer{}, ErrNoAgent
				}
				return Offer{Pools: h.other}, nil
			},
		},
		Taken: func() (map[gpu.DeviceID]string, error) {
			h.mu.Lock()
			defer h.mu.Unlock()
			return h.taken, nil
		},
	})
	s.idleFor = 0
	return s
}

// state is the state directory of the agents.
func (h *host) state() string { return filepath.Join(h.programs, "state") }

// use sets which GPUs work has, and which the first agent has taken.
func (h *host) use(held, taken []gpu.DeviceID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held, h.taken = held, map[gpu.DeviceID]string{}
	for _, id := range taken {
		h.taken[id] = "k8s-gpu"
	}
}

// pass has a supervisor make one pass, whatever attempts have failed before.
func (h *host) pass(s *Supervisor) {
	clear(s.retry)
	s.read(h.Context())
	s.pass(h.Context())
}

// stop ends a supervisor.
func (h *host) stop(s *Supervisor) {
	s.endAll(h.Context(), 10*time.Second)
}

func (h *host) answers(pool string) bool {
	_, err := mps.FindControl(mps.Pipe(h.root, pool))
	return err == nil
}

func (h *host) read(path ...string) string {
	h.Helper()
	text, err := os.ReadFile(filepath.Join(path...))
	check.NoError(h.T, err)
	return string(text)
}

func (h *host) connect(pool string) io.Closer {
	h.Helper()
	c, err := mpscontrol.Connect(mps.Pipe(h.root, pool))
	check.NoError(h.T, err)
	return c
}

// want checks which daemons answer.
func (h *host) want(when string, pools ...string) {
	h.Helper()
	all, _ := filepath.Glob(filepath.Join(h.root, inventory.ResourceDomain, "*"))
	var answering []string
	for _, folder := range all {
		if name := filepath.Base(folder); h.answers(name) {
			answering = append(answering, name)
		}
	}
	if strings.Join(answering, " ") != strings.Join(pools, " ") {
		h.Errorf("%s: daemons of %q, want %q\n%s", when, answering, pools, h.log)
	}
}

// pool has GPUs with 10 GiB for each client.
func pool(name string, threads int, gpus ...int) Pool {
	p := Pool{Name: name, Threads: threads}
	for _, n := range gpus {
		p.Devices = append(p.Devices, Device{coretest.GPU(n), 10 << 10})
	}
	return p
}

// A daemon is started as NVIDIA's mps-control-daemon starts it, and only once.
func TestStart(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0, 1))
	for range 3 {
		h.pass(s)
	}
	h.want("after three passes", "gpu.mps")
	first, second := string(coretest.GPU(0)), string(coretest.GPU(1))
	want := "Starting control daemon for " + first + "," + second + "\n" +
		"Cmd:set_default_device_pinned_mem_limit 0 10240M\n" +
		"Cmd:set_default_device_pinned_mem_limit " + first + " 10240M\n" +
		"Cmd:set_default_device_pinned_mem_limit 1 10240M\n" +
		"Cmd:set_default_device_pinned_mem_limit " + second + " 10240M\n" +
		"Cmd:set_default_active_thread_percentage 50\n" +
		"Cmd:get_server_list\n"
	if log := h.read(h.root, inventory.ResourceDomain, "gpu.mps", "log", "control.log"); log != want {
		t.Errorf("control.log:\n%swant\n%s", log, want)
	}
	if modes := h.read(h.programs, mpscontrol.ModesFile); modes != first+","+second+" EXCLUSIVE_PROCESS\n" {
		t.Errorf("compute modes: %s", modes)
	}
	h.stop(s)
	h.want("after the end of the supervisor")
	if modes := h.read(h.programs, mpscontrol.ModesFile); !strings.HasSuffix(modes, first+","+second+" DEFAULT\n") {
		t.Errorf("compute modes: %s", modes)
	}
}

// What was killed is started again, also over the socket that it has left, and without an agent that answers.
func TestRestart(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	h.offer(errors.New("no agent"))
	check.NoError(t, mpscontrol.Kill(mps.Pipe(h.root, "gpu.mps")))
	check.Until(t, "the end of the daemon", func() bool { return !h.answers("gpu.mps") })
	check.NoError(t, os.WriteFile(filepath.Join(h.programs, mpscontrol.FailFile), []byte("no CUDA-capable device\n"), 0o600))
	h.pass(s)
	h.pass(s)
	h.want("while it can't start")
	if n := strings.Count(h.log.String(), "no CUDA-capable device"); n != 1 {
		t.Errorf("the reason is logged %d times:\n%s", n, h.log)
	}
	check.NoError(t, os.Remove(filepath.Join(h.programs, mpscontrol.FailFile)))
	h.pass(s)
	h.want("when it can", "gpu.mps")
	if n := strings.Count(h.log.String(), "the pools of an agent are unknown"); n != 1 {
		t.Errorf("%d times:\n%s", n, h.log)
	}
}

// Without an agent that has ever answered nothing is started or ended.
func TestWithoutAgent(t *testing.T) {
	h := newHost(t)
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(h.supervisor())
	h.offer(errors.New("no agent"))
	h.pass(h.supervisor())
	h.want("with another supervisor", "gpu.mps")
}

// A daemon whose pool is gone, or has other settings, ends when it has no client left; its GPUs get no other daemon before.
func TestEndWithoutClients(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("few", 50, 0, 1))
	h.pass(s)
	client := h.connect("few")
	h.offer(nil, pool("many", 25, 1, 2), pool("few", 50, 0))
	h.pass(s)
	h.want("with a client", "few")
	if !strings.Contains(h.log.String(), "its clients have not ended: 1") || !strings.Contains(h.log.String(), "still has the daemon of pool few") {
		t.Errorf("no reason:\n%s", h.log)
	}
	h.stop(s)
	h.want("after the end of the supervisor, with a client", "few")
	s = h.supervisor()
	h.pass(s)
	h.want("adopted by the next supervisor", "few")
	check.NoError(t, client.Close())
	check.Until(t, "the end of the client", func() bool {
		n, err := s.folders("few").clients(t.Context())
		return err == nil && n == 0
	})
	h.pass(s)
	h.want("without a client", "few", "many")
	h.offer(nil)
	h.pass(s)
	h.want("without pools")
	if left := s.records(); len(left) > 0 {
		t.Errorf("records %v", left)
	}
}

// A daemon of another program is neither set up nor ended, and its place is taken when it has ended.
func TestOthersAreLeftAlone(t *testing.T) {
	h := newHost(t)
	listener := coretest.MPSDaemon(t, mps.Pipe(h.root, "gpu.mps"))
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	h.offer(nil)
	h.pass(s)
	h.stop(s)
	h.want("after the supervisor", "gpu.mps")
	if _, err := os.Stat(filepath.Join(h.programs, mpscontrol.ModesFile)); err == nil {
		t.Error("the compute mode was changed")
	}
	check.NoError(t, listener.Close())
	s = h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	h.want("in its place", "gpu.mps")
	if len(s.records()) != 1 {
		t.Error("no record")
	}
}

// A client that comes before the limits would have none: its daemon ends with it, and is started anew.
func TestEarlyClient(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	early := filepath.Join(h.programs, mpscontrol.EarlyFile)
	check.NoError(t, os.WriteFile(early, nil, 0o600))
	h.offer(nil, pool("gpu.mps", 50, 0))
	h.pass(s)
	check.Until(t, "the end of the daemon", func() bool { return !h.answers("gpu.mps") })
	if !strings.Contains(h.log.String(), errEarlyClient.Error()) {
		t.Errorf("no reason:\n%s", h.log)
	}
	check.NoError(t, os.Remove(early))
	h.pass(s)
	h.want("without such a client", "gpu.mps")
	if r := s.records()["gpu.mps"]; r.State != mps.Ready {
		t.Errorf("the record is %+v", r)
	}
}

// A daemon that is to end takes no new clients, also for a supervisor that was killed between its start and its limits.
func TestTakesNoClients(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("few", 50, 0))
	h.pass(s)
	client := h.connect("few")
	defer func() { check.NoError(t, client.Close()) }()
	daemons := mps.Of(inventory.Policy{}, h.root, h.state())
	takes := func(when string, want bool) {
		t.Helper()
		if err := daemons.Check("few"); (err == nil) != want {
			t.Errorf("%s: %v", when, err)
		}
	}
	takes("as it is wanted", true)
	h.offer(nil, pool("few", 25, 0))
	h.pass(s)
	takes("with other limits", false)
	h.offer(nil, pool("few", 50, 0))
	h.pass(s)
	takes("with the former limits again", true)
	r := s.records()["few"]
	r.State = mps.Starting
	check.NoError(t, s.write(r))
	takes("perhaps without limits", false)
}

// A pool that both agents of a node offer has one daemon, with the GPUs of both, which stays while one of them does not answer.
func TestTwoAgents(t *testing.T) {
	h := newHost(t)
	s := h.supervisor()
	h.offer(nil, pool("gpu.mps", 50, 1, 2))
	h.other = []Pool{{Name: "gpu.mps", Threads: 25, Devices: []Device{{coretest.GPU(0), 0}, {coretest.GPU(1), 5 << 10}}}, pool("few", 50, 3)}
	for range 2 {
		h.pass(s)
		h.want("of both", "few", "gpu.mps")
		first, second, third := coretest.GPU(0), coretest.GPU(1), coretest.GPU(2)
		want := Pool{Name: "gpu.mps", Threads: 25, Devices: []Device{{first, 0}, {second, 5 << 10}, {third, 10 << 10}}}
		if got := s.records()["gpu.mps"]; !got.Pool.equal(want) || got.State != mps.Ready {
			t.Errorf("%+v, want %+v", got, want)
		}
		h.other = nil
	}
	h.offer(errors.New("driver pending"))
	s = h.supervisor()
	h.other = []Pool{}
	h.pass(s)
	h.want("before the first agent has answered", "few", "gpu.mps")
	h.offer(nil, pool("gpu.mps", 50, 1))
	h.pass(s)
	h.want("of the first agent alone", "gpu.mps")
	if got := s.records()["gpu.mps"].Pool; !got.equal(pool("gpu.mps", 50, 1)) {
		t.Errorf("%+v", got)
	}
}

// Of two supervisors on a node one runs the daemons; the other one takes its place.
func TestTwoSupervisors(t *testing.T) {
	h := newHost(t)
	h.offer(nil, pool("gpu.mps", 50, 0))
	start := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { h.supervisor().Run(ctx, 10*time.Second) })
		return func() { cancel(); running.Wait() }
	}
	stop := start()
	check.Until(t, "a daemon", func() bool { return h.answers("gpu.mps") })
	stopOther := start()
	check.Until(t, "the other one to wait", func() bool { return strings.Contains(h.log.String(), "another mps-daemon") })
	stop()
	check.Until(t, "a daemon of the other one", func() bool { return h.answers("gpu.mps") })
	stopOther()
	h.want("after both")
}

// Run does all of it in time, and a GPU's shares are unhealthy for a moment only.
func TestRun(t *testing.T) {
	h := newHost(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	h.offer(nil, pool("gpu.mps", 50, 0))
	s := h.supervisor()
	go func() { defer close(ended); s.Run(ctx, 10*time.Second) }()
	await := func(what string) {
		t.Helper()
		check.Until(t, what, func() bool {
			r := s.records()["gpu.mps"]
			return r.State == mps.Ready && r.Process.runs() && h.answers("gpu.mps")
		})
	}
	await("a daemon")
	check.NoError(t, mpscontrol.Kill(mps.Pipe(h.root, "gpu.mps")))
	await("another one")
	cancel()
	<-ended
	h.want("after its end")
}

func TestMountShm(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	of, root := t.TempDir(), t.TempDir()
	t.Cleanup(func() {
		for _, folder := range []string{filepath.Join(root, "shm"), filepath.Join(of, "shm")} {
			_ = syscall.Unmount(folder, syscall.MNT_DETACH)
		}
	})
	for range 2 {
		if err := MountShm(of, ""); err != nil {
			t.Skip(err) // a container without CAP_SYS_ADMIN
		}
	}
	check.NoError(t, os.WriteFile(filepath.Join(of, "shm", "cuda.shm"), nil, 0o600))
	check.NoError(t, MountShm(of, root))
	check.NoError(t, MountShm(root, filepath.Join(of, "shm")))
	for _, folder := range []string{of, root} {
		if _, err := os.Stat(filepath.Join(folder, "shm", "cuda.shm")); err != nil {
			t.Errorf("it was mounted over, or is another one: %v", err)
		}
	}
}
