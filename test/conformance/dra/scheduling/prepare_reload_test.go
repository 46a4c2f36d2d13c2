//go:build !before1.37

package scheduling

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	devices "github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// late is a node whose policy changes between the allocation of claims and their preparation, which the agent's own adapter does.
type late struct {
	*cluster
	random  *rand.Rand
	source  *coretest.Source
	shares  *watch.Value[bool] // each share is a device
	adapter *dra.Adapter
	kubelet drav1.DRAPluginClient

	prepared, refused int
}

// Claim is the API server's answer to the agent.
func (l *late) Claim(_ context.Context, namespace, name string) (kubeapi.ResourceClaim, error) {
	var results []kubeapi.DeviceRequestAllocationResult
	text, err := json.Marshal(l.allocated[name])
	err = errors.Join(err, json.Unmarshal(text, &results))
	c := kubeapi.ResourceClaim{Metadata: kubeapi.ObjectMeta{Namespace: namespace, Name: name, UID: name}}
	c.Status.Allocation = &kubeapi.AllocationResult{Devices: kubeapi.DeviceAllocationResult{Results: results}}
	return c, err
}

// start starts the adapter, and connects to it as the kubelet does.
func (l *late) start() {
	l.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "late") // t.TempDir's path can be longer than a socket's may be
	if err != nil {
		l.Fatal(err)
	}
	l.adapter = dra.New(l.source, dra.Options{
		Node: node, KubeletDir: dir, StateDir: filepath.Join(dir, "state"), BootID: boot, API: l, SharesAsDevices: l.shares,
		CDIFolder: filepath.Join(dir, "cdi"), CDIVendor: "k8s.device-plugin.nvidia.com", MPSRoot: "/run/nvidia/mps",
	})
	ctx, cancel := context.WithCancel(l.Context())
	ended := make(chan error, 1)
	if err := os.Mkdir(filepath.Join(dir, "plugins_registry"), 0o755); err != nil {
		l.Fatal(err)
	}
	go func() { ended <- l.adapter.Run(ctx) }()
	l.await("socket", func() bool { return l.adapter.Stats().Socket != "" && l.adapter.Prepared() != nil })
	conn, err := grpc.NewClient("unix:"+l.adapter.Stats().Socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		l.Fatal(err)
	}
	l.kubelet = drav1.NewDRAPluginClient(conn)
	l.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, conn.Close(), os.RemoveAll(dir)); err != nil {
			l.Error(err)
		}
	})
}

func (l *late) await(what string, ok func() bool) {
	l.Helper()
	for began := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(began) > time.Minute {
			l.Fatal("no " + what)
		}
	}
}

// reload changes the policy of each GPU: exclusive, shared by time-slicing or MPS, of either pool.
func (l *late) reload() {
	s := coretest.GPUs(2)
	var rules []inventory.Rule
	for n := range s.Devices {
		one := rule(inventory.Rule{Pool: []string{"", "a"}[l.random.IntN(2)]}, n)
		if l.random.IntN(2) == 0 {
			one.Sharing = timeSlicing(2 + l.random.IntN(3))
			if l.random.IntN(3) == 0 {
				one.Sharing.Mode = inventory.MPS
			}
		}
		rules = append(rules, one)
	}
	c := config(rules...)
	c.Injection = inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
	spec := &inventory.CDI{Kind: "k8s.device-plugin.nvidia.com/gpu", Folder: "/var/run/cdi"}
	for _, d := range s.Devices {
		spec.Defined = append(spec.Defined, d.ID)
	}
	host := inventory.Host{MPS: []string{"a", "a.mps", "gpu", "gpu.mps"}, CDI: spec}
	l.source.Set(core.Build(s, health.Ledger{}, c).WithHost(host, inventory.OverlapRefuse))
}

// publish makes the slices those that the adapter wants now.
func (l *late) publish() {
	l.Helper()
	want := func() []kubeapi.Device {
		return devices.Devices(devices.Input{Allocatable: l.source.Current(), Prepared: l.adapter.Prepared(), BootID: boot, SharesAsDevices: l.shares.Load()})
	}
	l.await("devices of the policy", func() bool { return reflect.DeepEqual(l.adapter.Desired().Load(), want()) })
	l.slices = publish(l, l.adapter.Desired().Load())
}

// prepare prepares a claim, as the kubelet does when its pod starts.
func (l *late) prepare(uid string) {
	l.Helper()
	claims := []*drav1.Claim{{Namespace: "default", Name: uid, Uid: uid}}
	answer, err := l.kubelet.NodePrepareResources(l.Context(), &drav1.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		l.Fatal(err)
	}
	if answer.GetClaims()[uid].GetError() == "" {
		l.prepared++
	} else {
		l.refused++
	}
}

// end ends the pod of a claim.
func (l *late) end(uid string) {
	l.Helper()
	claims := []*drav1.Claim{{Namespace: "default", Name: uid, Uid: uid}}
	answer, err := l.kubelet.NodeUnprepareResources(l.Context(), &drav1.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil || answer.GetClaims()[uid].GetError() != "" {
		l.Fatal(err, answer)
	}
	delete(l.allocated, uid)
}

// check fails the test if two claims have hardware that they do not share, or if one has more or less than it was allocated.
func (l *late) check(about string) {
	l.Helper()
	shares := map[gpu.DeviceID]int{}
	all := l.adapter.Prepared()
	for i, p := range all {
		x, was := p.Results[0], l.allocated[p.UID][0]
		if whole := was.ShareID == nil && was.Device == devices.DeviceName(inventory.Unit{Device: gpu.Device{ID: x.At.GPU}}); x.Exclusive != whole {
			l.Fatalf("%s: %s was allocated %s, share %v, and has %s, exclusively: %t", about, p.UID, was.Device, was.ShareID, x.Device, x.Exclusive)
		}
		for _, q := range all[i+1:] {
			if y := q.Results[0]; x.At.Overlaps(y.At) && (x.Exclusive || y.Exclusive || x.Sharing != y.Sharing) {
				l.Fatalf("%s: %s has %s, and %s has %s", about, p.UID, x.Device, q.UID, y.Device)
			}
		}
		if shares[x.At.GPU]++; shares[x.At.GPU] > 4 {
			l.Fatalf("%s: %s has more shares than any policy has", about, x.At.GPU)
		}
	}
}

// A policy may change after the scheduler has allocated a device and before the kubelet prepares the claim, whether the API server has the fields of
// shares or each share is a device. The scheduler's allocator gives a whole GPU and its shares out then: the agent never prepares both, and
// never another form than that which was allocated.
func TestPolicyChangesBetweenAllocationAndPrepare(t *testing.T) {
	classes := classLister{}
	for _, c := range []core.Config{config(inventory.Rule{Pool: "a"}), config(inventory.Rule{Sharing: timeSlicing(2)})} {
		maps.Copy(classes, printedClasses(t, c))
	}
	names := slices.Sorted(maps.Keys(classes))
	prepared, refused := 0, 0
	for seed := range uint64(40) {
		l := &late{
			cluster: newCluster(t, classes, nil), random: rand.New(rand.NewPCG(seed, 12)), //nolint:gosec // reproducible
			source: coretest.NewSource(), shares: watch.NewValue(seed%2 == 0),
		}
		l.reload()
		l.start()
		for step := range 25 {
			if l.random.IntN(3) == 0 {
				l.reload()
			}
			l.publish()
			for i := range l.random.IntN(4) {
				if _, err := l.allocate(fmt.Sprintf("c-%d-%d", step, i), one(names[l.random.IntN(len(names))])); err != nil {
					t.Fatal(err)
				}
			}
			for _, uid := range slices.Sorted(maps.Keys(l.allocated)) {
				switch n := l.random.IntN(6); {
				case n < 3: // later, or again: the kubelet repeats what it has not stored
					l.prepare(uid)
				case n == 3:
					l.end(uid)
				}
				l.check(fmt.Sprintf("seed %d, step %d", seed, step))
			}
		}
		prepared, refused = prepared+l.prepared, refused+l.refused
	}
	t.Log(prepared, "prepared,", refused, "refused")
	if prepared < 300 || refused == 0 {
		t.Error("not both ways were taken")
	}
}
