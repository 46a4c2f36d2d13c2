package dra

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

const (
	node = "node1"
	boot = "boot-1"
)

// api is an API server of claims.
type api struct {
	mu     sync.Mutex
	claims map[string]kubeapi.ResourceClaim // by "namespace/name"
	err    error
	calls  int
	hung   bool // requests have no answer
}

func (a *api) Claim(ctx context.Context, namespace, name string) (kubeapi.ResourceClaim, error) {
	a.mu.Lock()
	hung := a.hung
	a.mu.Unlock()
	if hung {
		<-ctx.Done()
		return kubeapi.ResourceClaim{}, fmt.Errorf("%w: %w", kubeapi.ErrUnavailable, ctx.Err())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	if a.err != nil {
		return kubeapi.ResourceClaim{}, a.err
	}
	c, ok := a.claims[namespace+"/"+name]
	if !ok {
		return c, fmt.Errorf("resourceclaims %s/%s: %w", namespace, name, kubeapi.ErrNotFound)
	}
	return c, nil
}

func (a *api) fail(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.err = err
}

// hang leaves requests without an answer, or answers again.
func (a *api) hang(on bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.hung = on
}

func (a *api) put(c kubeapi.ResourceClaim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.claims[c.Metadata.Namespace+"/"+c.Metadata.Name] = c
}

func (a *api) remove(c kubeapi.ResourceClaim) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.claims, c.Metadata.Namespace+"/"+c.Metadata.Name)
}

func (a *api) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.calls
}

// uidOf is the UID of the claim with a name in the rig.
func uidOf(name string) string { return "uid-" + name }

// newClaim returns a claim in the namespace default, allocated to results.
func newClaim(name string, results ...kubeapi.DeviceRequestAllocationResult) kubeapi.ResourceClaim {
	c := kubeapi.ResourceClaim{Metadata: kubeapi.ObjectMeta{Namespace: "default", Name: name, UID: uidOf(name)}}
	c.Status.Allocation = &kubeapi.AllocationResult{Devices: kubeapi.DeviceAllocationResult{Results: results}}
	return c
}

// result is a device of a request "gpu".
func result(id gpu.DeviceID, change ...func(*kubeapi.DeviceRequestAllocationResult)) kubeapi.DeviceRequestAllocationResult {
	r := kubeapi.DeviceRequestAllocationResult{Request: "gpu", Driver: resourceslice.Driver, Pool: node, Device: deviceName(id)}
	for _, c := range change {
		c(&r)
	}
	return r
}

func deviceName(id gpu.DeviceID) string {
	return resourceslice.DeviceName(inventory.Unit{Device: gpu.Device{ID: id}})
}

// config is the configuration of a node that offers devices through DRA.
func config(change ...func(*core.Config)) core.Config {
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	c.API = inventory.DRA
	c.Injection = inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
	for _, f := range change {
		f(&c)
	}
	return c
}

// build returns the inventory of a snapshot, whose devices the agent's CDI specification defines.
func build(s gpu.Snapshot, l health.Ledger, c core.Config) *inventory.Allocatable {
	return withCDI(core.Build(s, l, c).WithoutHost(), s)
}

func withCDI(inv *inventory.Allocatable, s gpu.Snapshot) *inventory.Allocatable {
	pools := map[string]bool{}
	for u := range inv.Units() {
		pools[u.Pool] = true
	}
	h := inventory.Host{CDI: specOf(inv, s)}
	for p := range pools {
		h.MPS = append(h.MPS, p)
	}
	return inv.WithHost(h, inventory.OverlapRefuse)
}

// specOf returns a CDI specification of this agent that defines the devices of a snapshot.
func specOf(inv *inventory.Allocatable, s gpu.Snapshot) *inventory.CDI {
	spec := &inventory.CDI{Incarnation: inv.Incarnation(), Kind: "k8s.device-plugin.nvidia.com/gpu", Folder: "/var/run/cdi"}
	for _, d := range s.Devices {
		spec.Defined = append(spec.Defined, d.ID)
	}
	slices.Sort(spec.Defined)
	return spec
}

// shared shares each device.
func shared(mode inventory.SharingMode, n int) func(*core.Config) {
	return func(c *core.Config) {
		c.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: mode, Replicas: n}}}
	}
}

// rig is an adapter over a source and an API server that the test sets.
type rig struct {
	testing.TB
	ctx     context.Context // ends before the test times out
	dir     string
	src     *coretest.Source
	api     *api
	tasks   *watchdog.Registry
	adapter *Adapter
	conn    *grpc.ClientConn
	change  []func(*Adapter)
	stop    func()
}

// newRig returns a rig whose adapter runs, and has inv.
func newRig(t testing.TB, inv *inventory.Allocatable, change ...func(*Adapter)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dra") // in memory: on a busy disk each record takes seconds
	if err != nil {
		dir, err = os.MkdirTemp("", "dra") // t.TempDir's path can be longer than a socket's may be
	}
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	r := &rig{
		TB: t, ctx: ctx, dir: dir, src: coretest.NewSource(), api: &api{claims: map[string]kubeapi.ResourceClaim{}},
		change: change, stop: func() {},
	}
	t.Cleanup(func() {
		r.stop()
		cancel()
		_ = os.RemoveAll(dir)
	})
	r.must(os.Mkdir(filepath.Join(dir, registryDir), 0o755))
	if inv != nil {
		r.src.Set(inv)
	}
	r.start()
	return r
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// start starts another adapter, as a new process would.
func (r *rig) start() {
	r.Helper()
	r.stop()
	tasks := watchdog.NewRegistry()
	r.tasks = tasks
	r.adapter = New(r.src, Options{
		Node: node, KubeletDir: r.dir, StateDir: filepath.Join(r.dir, "state"), BootID: boot, API: r.api,
		CDIFolder: filepath.Join(r.dir, "cdi"), CDIVendor: "k8s.device-plugin.nvidia.com", MPSRoot: "/run/nvidia/mps", Watchdog: tasks,
	})
	r.adapter.limits.socketPoll, r.adapter.limits.apiRetry = 20*time.Millisecond, 5*time.Millisecond
	r.adapter.limits.queryFirst = 5 * time.Millisecond
	for _, c := range r.change {
		c(r.adapter)
	}
	a := r.adapter
	ctx, cancel := context.WithCancel(r.ctx)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	r.stop = func() {
		cancel()
		if r.conn != nil {
			_ = r.conn.Close()
		}
		if err := <-ended; err != nil {
			r.Error(err)
		}
		abandoned := func(s watchdog.Status) bool { return s.Name == "prepared claims" || s.Name == "claims of pods" }
		for slices.ContainsFunc(tasks.Tasks(), abandoned) && watch.Sleep(r.ctx, time.Millisecond) {
		}
		r.stop = func() {}
	}
	r.connect()
}

// connect connects to the socket of the adapter, as a kubelet does.
func (r *rig) connect() {
	r.Helper()
	r.await("a socket", func() bool { return r.adapter.Stats().Socket != "" })
	conn, err := grpc.NewClient("unix:"+r.adapter.Stats().Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	r.must(err)
	r.conn = conn
}

// register does what a kubelet does when it finds a socket.
func (r *rig) register(status *registration.RegistrationStatus) *registration.PluginInfo {
	r.Helper()
	c := registration.NewRegistrationClient(r.conn)
	info, err := c.GetInfo(r.ctx, &registration.InfoRequest{})
	r.must(err)
	_, err = c.NotifyRegistrationStatus(r.ctx, status)
	r.must(err)
	return info
}

// await waits for a condition.
func (r *rig) await(what string, ok func() bool) {
	r.Helper()
	for !ok() {
		if !watch.Sleep(r.ctx, 2*time.Millisecond) {
			r.Fatalf("no %s: %+v, warnings %q", what, r.adapter.Stats(), problem.Lines(r.adapter.Problems()))
		}
	}
}
