package limitserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/limit"
	"github.com/tandem-gpu/tandem/internal/node/cgroup"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

const (
	gib  = 1 << 30
	uid  = "4b1f9c6e-0d5e-4a57-8a5f-0f6f5b6a2c11"
	pod  = "/kubepods/burstable/pod" + uid
	name = gpu.DeviceID("GPU-1")
)

// driver is a driver whose calls a test sets.
type driver struct {
	mu          sync.Mutex
	calls       []string
	open, most  int
	devices     []gpu.Device
	unsupported string
	openErr     error
	setErr      error
	forgets     bool // what SetMemoryLimit sets is not there
	onRead      func()
	closeErr    error                      // guarded by mu
	limits      map[string]gpu.MemoryLimit // by path and GPU
	hang        chan struct{}              // SetMemoryLimit waits for its end; nil = it does not wait
}

func (d *driver) call(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls = append(d.calls, what)
}

func (d *driver) made() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return strings.Join(d.calls, ", ")
}

func (d *driver) count(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.open += n
	d.most = max(d.most, d.open)
}

func (d *driver) Open() (Driver, error) {
	d.call("open")
	if d.openErr != nil {
		return nil, d.openErr
	}
	d.count(1)
	return d, nil
}

func (d *driver) LimitsUnsupported() string { return d.unsupported }

func (d *driver) Snapshot() (gpu.Snapshot, error) { return gpu.Snapshot{Devices: d.devices}, nil }

func (d *driver) ReadGPU(id gpu.DeviceID) (gpu.Device, error) {
	if d.onRead != nil {
		d.onRead()
	}
	for _, one := range d.devices {
		if one.ID == id {
			return one, nil
		}
	}
	return gpu.Device{}, errors.New("nvmlDeviceGetHandleByUUID: Not Found")
}

func (d *driver) SetMemoryLimit(c gpu.LimitChange) error {
	d.call(fmt.Sprint("set ", c.GPU, " ", c.Soft, " ", c.Hard, " ", c.Group))
	if d.hang != nil {
		<-d.hang
	}
	if d.setErr == nil && !d.forgets {
		d.limits[c.Group+string(c.GPU)] = gpu.MemoryLimit{Soft: c.Soft, Hard: c.Hard}
	}
	return d.setErr
}

func (d *driver) MemoryLimits(queries []gpu.LimitQuery) (answers []gpu.LimitAnswer, err error) {
	for _, q := range queries {
		a := gpu.LimitAnswer{LimitQuery: q, State: gpu.NoLimit}
		if l, set := d.limits[q.Group+string(q.GPU)]; set {
			a.Limit, a.State = l, gpu.LimitRead
		}
		answers = append(answers, a)
	}
	return answers, nil
}

func (d *driver) Close() error {
	d.count(-1)
	d.call("close")
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.closeErr
}

// closes sets what Close returns.
func (d *driver) closes(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closeErr = err
}

// rig is a server with its client, on a node with a pod.
type rig struct {
	*driver
	Client
	dir, mount string
	log        *logbuffer.Buffer
	ended      chan error
	within     time.Duration // for the driver; before the start only
	noGroups   bool          // the node has no control groups of version 2
}

func start(t *testing.T, before ...func(*rig)) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the server serves root only")
	}
	r := &rig{dir: coretest.ShortDir(t), mount: t.TempDir(), log: &logbuffer.Buffer{}, ended: make(chan error, 1), within: time.Minute}
	r.driver = &driver{limits: map[string]gpu.MemoryLimit{}, devices: []gpu.Device{
		{ID: name, At: gpu.WholeGPU(name), Memory: 80 * gib},
		{ID: "GPU-2", At: gpu.WholeGPU("GPU-2"), Memory: 80 * gib, MIG: true},
	}}
	r.Client = Client{Socket: Path(r.dir)}
	r.makeGroup(t, pod)
	for _, file := range []string{"cgroup.controllers", "cgroup.subtree_control"} {
		check.NoError(t, os.WriteFile(filepath.Join(r.mount, file), []byte("cpu misc\n"), 0o600))
	}
	for _, change := range before {
		change(r)
	}
	s := &Server{
		StateDir: r.dir, Groups: cgroup.FS{Mount: r.mount, AnyFilesystem: !r.noGroups}, Open: r.Open, Log: slog.New(slog.NewTextHandler(r.log, nil)),
		DriverWithin: r.within,
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.ended <- s.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	check.Until(t, "the server listens", func() bool { return r.Serves(ctx) == nil })
	return r
}

func (r *rig) makeGroup(t *testing.T, group string) {
	t.Helper()
	check.NoError(t, os.MkdirAll(r.mount+group, 0o755), os.WriteFile(filepath.Join(r.mount, group, "cgroup.controllers"), []byte("misc\n"), 0o600))
}

// id is the group as it is now; one that is not there has another inode.
func (r *rig) id(group string) cgroup.ID {
	var s syscall.Stat_t
	if syscall.Stat(r.mount+group, &s) != nil {
		return cgroup.ID{Path: group, Inode: 1}
	}
	return cgroup.ID{Path: group, Inode: s.Ino}
}

func (r *rig) set(t *testing.T, group string, id gpu.DeviceID, soft, hard uint64) error {
	t.Helper()
	return r.Client.SetMemoryLimit(t.Context(), r.id(group), gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: id}, Soft: soft, Hard: hard})
}

// The driver is open for the request only, and gets the path below the mount point, whatever path the agent has for the driver.
func TestLimitIsSet(t *testing.T) {
	r := start(t)
	for _, c := range []struct {
		soft, hard uint64
	}{{20 * gib, 20 * gib}, {0, 20 * gib}, {0, gpu.NoMemoryLimit}} {
		r.calls = nil
		check.NoError(t, r.set(t, pod, name, c.soft, c.hard))
		if want := fmt.Sprint("open, set GPU-1 ", c.soft, " ", c.hard, " ", r.mount+pod, ", close"); r.made() != want {
			t.Errorf("calls %q, want %q", r.made(), want)
		}
	}
}

// A limit is tried on a group of the server, which is there for the request only: whether the driver takes it or not (fence 9), also after a server was killed.
func TestTryLimit(t *testing.T) {
	const end = "18446744073709551615"
	var at string
	leave := func(r *rig) { // GPU-2 has none
		at = r.mount + "/tandem-limit-test"
		check.NoError(t, os.Mkdir(at, 0o755))
		r.limits[at+string(name)] = gpu.MemoryLimit{Soft: 3 << 20, Hard: 3 << 20}
	}
	r := start(t, leave)
	calls := func(err, want error, made ...string) {
		t.Helper()
		for i := range made {
			made[i] = strings.ReplaceAll(made[i], "AT", at)
		}
		if got := r.made(); got != strings.Join(made, ", ") || !errors.Is(err, want) && (err == nil || err.Error() != want.Error()) {
			t.Errorf("%v, want %v; calls %q, want %q", err, want, got, made)
		}
		if _, err := os.Stat(at); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the group is left: %v", err)
		}
		r.calls = nil
	}
	try := func() error { return r.TryLimit(t.Context(), name, limit.Misc) }
	calls(nil, nil, "open", "set GPU-1 0 "+end+" AT", "close")
	calls(try(), nil, "open", "set GPU-1 3145728 3145728 AT", "set GPU-1 0 "+end+" AT", "close")
	r.setErr = errors.New("nvmlDeviceSetMemoryLimits_v1: Not Supported")
	delete(r.limits, at+string(name))
	calls(try(), r.setErr, "open", "set GPU-1 3145728 3145728 AT", "close")
	r.setErr, r.forgets = nil, true
	calls(try(), errors.New("the driver returns no limit for a group after one was set"), "open", "set GPU-1 3145728 3145728 AT", "set GPU-1 0 "+end+" AT", "close")
	r.forgets = false
	if err := r.TryLimit(t.Context(), "GPU-2", limit.Misc); err == nil || !strings.Contains(err.Error(), "MIG mode") {
		t.Errorf("%v", err)
	}
	r.calls = nil
	check.NoError(t, os.WriteFile(r.mount+"/cgroup.controllers", []byte("cpu\n"), 0o600))
	if e, ok := errors.AsType[*UnavailableError](try()); !ok || r.made() != "" {
		t.Errorf("%v, calls %q", e, r.made())
	}
	if err := r.TryLimit(t.Context(), "GPU-1,GPU-2", limit.Misc); err == nil || !strings.Contains(err.Error(), "not the UUID") {
		t.Errorf("%v", err)
	}
}

// Only groups of pods and of their containers, as both drivers of the kubelet make them; and what is below a container, as with crun; never one that has other pods below it (fence 23, and "Never").
func TestGroups(t *testing.T) {
	systemd := strings.ReplaceAll(uid, "-", "_")
	for group, want := range map[string]bool{
		pod: true, pod + "/0123456789ab": true, "/kubepods/pod" + uid: true, "/kubepods/besteffort/pod" + strings.Repeat("a", 32): true,
		"/kubepods.slice/kubepods-pod" + systemd + ".slice":                                                                                                 true,
		"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemd + ".slice":                                                              true,
		"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + systemd + ".slice/cri-containerd-0123.scope":                                    true,
		"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + systemd + ".slice/cri-containerd.scope": true,
		"/system.slice/docker-1.scope/kubelet/kubepods/burstable/pod" + uid + "/c":                                                                          true,
		pod + "/crio-" + strings.Repeat("0a", 32) + ".scope/container":                                                                                      true, pod + "/" + strings.Repeat("0a", 32) + "/": false,
		"": false, "/": false, "/kubepods": false, "/kubepods/burstable": false, "/kubepods.slice": false, "/kubepods.slice/kubepods-burstable.slice": false,
		"/kubepods/burstable/podx": false, "/kubepods/other/pod" + uid: false, pod + "/c/below": false, pod + "/": false, "/pod" + uid: false,
		"kubepods/pod" + uid: false, "/nomad.slice/share.slice/a.b.scope": false, "/user.slice": false, "/kubepods.slice/system.slice": false,
	} {
		err := request{Group: group, GPU: name, Hard: gib}.check()
		if (err == nil) != want {
			t.Errorf("%q: %v", group, err)
		}
	}
}

// The server does not rely on the agent that asks, and changes nothing it should not.
func TestServerChecksWhatItSets(t *testing.T) {
	r := start(t)
	check.NoError(t, os.Symlink(r.mount+pod, r.mount+"/kubepods/pod"+strings.Repeat("b", 32)))
	r.makeGroup(t, "/kubepods")
	r.makeGroup(t, "/nomad.slice/share.slice/a.scope")
	for what, c := range map[string]struct {
		group      string
		gpu        gpu.DeviceID
		soft, hard uint64
		want       string
	}{
		"the group of all pods":     {"/kubepods", name, 0, gib, "not the control group of a pod"},
		"a group of Nomad":          {"/nomad.slice/share.slice/a.scope", name, 0, gib, "not the control group of a pod"},
		"a path with ..":            {pod + "/..", name, 0, gib, "not the path of a control group"},
		"a symbolic link":           {"/kubepods/pod" + strings.Repeat("b", 32), name, 0, gib, "a symbolic link"},
		"a MIG instance":            {pod, "MIG-1", 0, gib, "not the UUID of a whole GPU"},
		"two GPUs":                  {pod, "GPU-1,GPU-2", 0, gib, "not the UUID of a whole GPU"},
		"an unknown GPU":            {pod, "GPU-3", 0, gib, "GPU-3 can't be read: nvmlDeviceGetHandleByUUID: Not Found"},
		"a GPU with MIG mode":       {pod, "GPU-2", 0, gib, "MIG mode"},
		"no memory at all":          {pod, name, 0, 0, "want whole MiB"},
		"half a MiB":                {pod, name, 0, gib + 1<<19, "want whole MiB"},
		"more than the GPU has":     {pod, name, 0, 81 * gib, "the GPU has 81920"},
		"a part that is reserved":   {pod, name, gib, 2 * gib, "want 0 or the hard one"},
		"reserved without a limit":  {pod, name, gib, gpu.NoMemoryLimit, "want 0"},
		"all problems in one error": {"/", "0", 0, 1, "/\" is not the control group of a pod or of a container of one\n\"0\" is not the UUID of a whole GPU\nhard limit"},
	} {
		if err := r.set(t, c.group, c.gpu, c.soft, c.hard); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(r.made(), "set") {
			t.Errorf("%s: %v, calls %q", what, err, r.made())
		}
	}
}

// A group that has the path of the one that is meant gets nothing, also if it has it since the driver was opened (fence 19).
func TestAnotherGroup(t *testing.T) {
	r := start(t)
	replace := func() { // a new folder, and the old one keeps its inode
		check.NoError(t, os.Rename(r.mount+pod, r.mount+"/old"))
		r.makeGroup(t, pod)
	}
	was := r.id(pod)
	change := gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: name}, Hard: gib}
	r.onRead = replace
	if err := r.Client.SetMemoryLimit(t.Context(), was, change); !errors.Is(err, fs.ErrNotExist) || r.made() != "open, close" {
		t.Errorf("replaced meanwhile: %v, calls %q", err, r.made())
	}
	r.calls, r.onRead = nil, nil
	if err := r.Client.SetMemoryLimit(t.Context(), was, change); !errors.Is(err, fs.ErrNotExist) || r.made() != "" {
		t.Errorf("another one: %v, calls %q", err, r.made())
	}
	check.NoError(t, os.RemoveAll(r.mount+pod))
	if err := r.Client.SetMemoryLimit(t.Context(), was, change); !errors.Is(err, fs.ErrNotExist) || r.made() != "" {
		t.Errorf("ended: %v, calls %q", err, r.made())
	}
}

// While the driver is released for a reset, the server does not open it.
func TestReleasedDriver(t *testing.T) {
	r := start(t)
	mark := func(m ownership.Mark) {
		m.Agent = ownership.Agents()[0]
		check.NoError(t, ownership.Write(r.dir, ownership.File{Taken: map[gpu.DeviceID]ownership.Mark{"GPU-2": m}}))
	}
	mark(ownership.Mark{Purpose: inventory.Reset, DriverReleased: true})
	err := r.set(t, pod, name, 0, gib)
	if e, ok := errors.AsType[*UnavailableError](err); !ok || r.made() != "" || !strings.Contains(err.Error(), "reset of GPU-2") {
		t.Errorf("%v, %+v, calls %q", err, e, r.made())
	}
	mark(ownership.Mark{Purpose: inventory.Proof})
	check.NoError(t, r.set(t, pod, name, 0, gib))
	check.NoError(t, os.WriteFile(filepath.Join(r.dir, ownership.FileName), []byte("{"), 0o600))
	r.calls = nil
	if err := r.set(t, pod, name, 0, gib); err == nil || r.made() != "" {
		t.Errorf("not known: %v, calls %q", err, r.made())
	}
}

// What the client returns is what the driver does.
func TestErrorsSurviveTheWire(t *testing.T) {
	r := start(t)
	refused := errors.New("nvmlDeviceSetMemoryLimits_v1: Invalid Argument")
	r.setErr = refused
	if err := r.set(t, pod, name, 0, gib); err == nil || err.Error() != refused.Error() || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, want %v", err, refused)
	}
	r.setErr, r.unsupported = nil, "driver 580.159.04: want 615 or newer"
	if e, ok := errors.AsType[*UnavailableError](r.set(t, pod, name, 0, gib)); !ok || e.Err.Error() != r.unsupported {
		t.Errorf("%v", e)
	}
	r.unsupported, r.openErr = "", gpu.ErrNoDriver
	if e, ok := errors.AsType[*UnavailableError](r.set(t, pod, name, 0, gib)); !ok || !strings.Contains(e.Error(), gpu.ErrNoDriver.Error()) {
		t.Errorf("%v", e)
	}
}

// The driver is open once at a time.
func TestOneAtATime(t *testing.T) {
	r := start(t)
	var running sync.WaitGroup
	for range 8 {
		running.Go(func() {
			if err := r.set(t, pod, name, 0, gib); err != nil {
				t.Error(err)
			}
		})
	}
	running.Wait()
	if r.most != 1 || r.open != 0 {
		t.Errorf("open %d times at once, %d at the end", r.most, r.open)
	}
}

// A call that hangs ends the request in time, and the process.
func TestHungDriver(t *testing.T) {
	r := start(t, func(r *rig) { r.within = 300 * time.Millisecond })
	r.hang = make(chan struct{})
	defer close(r.hang)
	if err := r.set(t, pod, name, 0, gib); err == nil || !strings.Contains(err.Error(), ErrHung.Error()) {
		t.Errorf("%v", err)
	}
	if err := <-r.ended; !errors.Is(err, ErrHung) {
		t.Errorf("the process ends with %v", err)
	}
	if _, ok := errors.AsType[*UnavailableError](r.Ready(t.Context())); !ok {
		t.Error("it is ready")
	}
}

// While a call about one GPU has not returned, the driver can't be closed: limits are set as before, and it is closed later. If it is released for a reset before
// that, the process ends.
func TestDriverThatCannotBeClosed(t *testing.T) {
	r := start(t)
	r.closes(errors.New("driver call has not returned: nvmlDeviceSetMemoryLimits_v1, GPU index 1"))
	for range 2 {
		check.NoError(t, r.set(t, pod, name, 0, gib))
	}
	closed := func() int { return strings.Count(r.made(), "close") }
	check.Until(t, "it is closed again", func() bool { return closed() > 2 })
	check.NoError(t, r.set(t, pod, name, 0, gib))
	r.closes(nil)
	before := closed() // more often if it takes long until here
	check.Until(t, "it is closed", func() bool { return closed() > before })
	before = closed()
	time.Sleep(closeEvery + closeEvery/2)
	if n := closed(); n > before+1 {
		t.Errorf("closed %d times more", n-before)
	}
	r.closes(errors.New("driver call has not returned"))
	check.NoError(t, r.set(t, pod, name, 0, gib))
	mark := ownership.Mark{Agent: ownership.Agents()[0], Purpose: inventory.Reset, DriverReleased: true}
	check.NoError(t, ownership.Write(r.dir, ownership.File{Taken: map[gpu.DeviceID]ownership.Mark{name: mark}}))
	if err := <-r.ended; !errors.Is(err, ErrHung) {
		t.Errorf("the process ends with %v", err)
	}
}

// A limit is not set after the client has left: half of its time is for the driver. Nothing is done then, and the client knows that.
func TestTooLate(t *testing.T) {
	const within = 4 * time.Second
	r := start(t, func(r *rig) { r.within = time.Minute })
	ask := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return r.Client.SetMemoryLimit(ctx, r.id(pod), gpu.LimitChange{LimitQuery: gpu.LimitQuery{GPU: name}, Hard: gib})
	}
	late := func(what string, err error) {
		t.Helper()
		if _, unavailable := errors.AsType[*UnavailableError](err); !unavailable || strings.Contains(r.made(), "set") {
			t.Errorf("%s: %v, calls %q", what, err, r.made())
		}
	}
	r.onRead = func() { time.Sleep(within * 5 / 8) }
	late("the driver is slow to open", ask())
	reads, waited := make(chan struct{}), make(chan struct{})
	r.onRead = func() { // until half of the time of one that waits for its turn is over, and its own before that
		close(reads)
		<-waited
	}
	var first sync.WaitGroup
	first.Go(func() { late("the first one", ask()) })
	<-reads
	late("others have the driver", ask())
	close(waited)
	first.Wait()
	r.onRead = nil
	check.NoError(t, ask())
}

// The probe of the kubelet finds a server that answers, also where no limit can be set: on a node without control groups of version 2 a restart would change nothing.
func TestServesWithoutGroups(t *testing.T) {
	r := start(t, func(r *rig) { r.noGroups = true })
	check.NoError(t, r.Serves(t.Context()))
	if _, unavailable := errors.AsType[*UnavailableError](r.Ready(t.Context())); !unavailable {
		t.Error("the agent takes it for ready")
	}
}

// Without an answer it is not known whether the limit was set.
func TestServerThatIsKilled(t *testing.T) {
	socket := coretest.ShortDir(t) + "/s"
	l, err := net.Listen("unix", socket)
	check.NoError(t, err)
	defer func() { _ = l.Close() }()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = http.ReadRequest(bufio.NewReader(conn))
			_ = conn.Close()
		}
	}()
	err = Client{socket}.SetMemoryLimit(t.Context(), cgroup.ID{Path: pod}, gpu.LimitChange{})
	if _, unavailable := errors.AsType[*UnavailableError](err); err == nil || unavailable || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v", err)
	}
}

// The error names what is missing.
func TestNoComponent(t *testing.T) {
	c := Client{Path(t.TempDir())}
	for what, err := range map[string]error{"ready": c.Ready(t.Context()), "set": c.SetMemoryLimit(t.Context(), cgroup.ID{Path: pod}, gpu.LimitChange{})} {
		e, ok := errors.AsType[*UnavailableError](err)
		if !ok || !strings.Contains(e.Remedy, "deploy/limits") || !strings.Contains(e.Remedy, "memoryLimits.enabled") || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// While the component is missing, shares of claims whose limit is required take no new work, and their cause names it.
func TestPoolWithoutComponent(t *testing.T) {
	snapshot, config := coretest.GPUs(1), core.DefaultConfig()
	config.API = inventory.DRA
	config.Policy.Limits = inventory.LimitPolicy{On: true, Reserve: gib}
	config.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2, Limit: inventory.LimitRequired}}}
	inv := core.Build(snapshot, health.Ledger{}, config).WithoutHost()
	support := limit.Support{Node: limit.Node{Backend: limit.Misc, CannotSet: Client{Path(t.TempDir())}.Ready(t.Context()).Error()}}
	units := 0
	for u := range inv.WithHost(inventory.Host{Limits: support.Limits(inv)}, inventory.OverlapRefuse).Units() {
		units++
		if h := u.Health; h.Schedulable() || h.Reason != health.ReasonNoLimit || !strings.Contains(h.String(), "deploy/limits") || !strings.Contains(h.String(), "memoryLimits.enabled") {
			t.Errorf("%s: %s", u.ID, h)
		}
	}
	if units != 2 {
		t.Errorf("%d units", units)
	}
}
