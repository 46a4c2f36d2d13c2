package publisher_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

const node = "n1"

// agent is a publisher and the API server that it publishes to, in a bubble: all waits are those of its clock.
type agent struct {
	t       *testing.T
	api     *kubeapitest.Server
	devices *watch.Value[[]kubeapi.Device]
	log     logbuffer.Buffer
	client  *kubeapi.Client
	*publisher.Publisher
	stop func()
}

// inBubble runs a test with an API server that has the Node, and a publisher that knows no devices so far.
func inBubble(t *testing.T, test func(*agent)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		a := &agent{t: t, api: kubeapitest.NewInMemory(), devices: watch.NewValue[[]kubeapi.Device](nil)}
		a.api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: node}})
		a.start()
		synctest.Wait()
		test(a)
		a.stop()
		a.api.Close()
		synctest.Wait()
	})
}

// start starts a publisher, as a new process does.
func (a *agent) start() {
	a.t.Helper()
	client, err := kubeapi.New(kubeapi.Options{Address: a.api.URL, Dial: a.api.Dial})
	if err != nil {
		a.t.Fatal(err)
	}
	registry := watchdog.NewRegistry()
	a.client = client
	a.Publisher = publisher.New(publisher.Options{
		API: client, Node: node, Driver: resourceslice.Driver, Devices: a.devices, Watchdog: registry,
		Log: slog.New(slog.NewTextHandler(&a.log, &slog.HandlerOptions{Level: slog.LevelInfo})),
	})
	ctx, cancel := context.WithCancel(a.t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	checked := make(chan struct{})
	go func() {
		defer close(checked)
		for watch.Sleep(ctx, time.Second) {
			if late := registry.Late(time.Now()); len(late) > 0 {
				a.t.Errorf("overdue: %+v", late)
			}
		}
	}()
	a.stop = func() {
		cancel()
		<-checked
		if err := <-done; err != nil {
			a.t.Error(err)
		}
		client.CloseIdleConnections()
		if left := registry.Tasks(); len(left) != 0 {
			a.t.Errorf("tasks after the end: %+v", left)
		}
	}
}

// restart stops the publisher and starts another one.
func (a *agent) restart() { a.stop(); a.start() }

// after lets some time pass.
func (a *agent) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// set gives the publisher devices and lets it publish them.
func (a *agent) set(devices ...kubeapi.Device) {
	a.devices.Store(append([]kubeapi.Device{}, devices...)) // none are not nil
	a.after(time.Second)
}

func gpu(i int) kubeapi.Device {
	model, minor := "NVIDIA H100 80GB HBM3", int64(i)
	return kubeapi.Device{
		Name:       fmt.Sprintf("gpu-%08d-0000-0000-0000-000000000000", i),
		Attributes: map[string]kubeapi.DeviceAttribute{"productName": {String: &model}, "minor": {Int: &minor}},
		Capacity:   map[string]kubeapi.DeviceCapacity{"memory": {Value: "80Gi"}},
	}
}

func gpus(n int) []kubeapi.Device {
	all := make([]kubeapi.Device, n)
	for i := range all {
		all[i] = gpu(i)
	}
	return all
}

var faultTime = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func tainted(d kubeapi.Device, effect kubeapi.TaintEffect) kubeapi.Device {
	d.Taints = append(slices.Clone(d.Taints), kubeapi.DeviceTaint{Key: "gpu.nvidia.com/health", Value: "xid-79", Effect: effect, TimeAdded: faultTime})
	return d
}

// published are the devices in the API; the slices have to form one complete pool of the node.
func (a *agent) published() []kubeapi.Device {
	a.t.Helper()
	return poolOf(a.t, a.api)
}

func poolOf(t *testing.T, api *kubeapitest.Server) []kubeapi.Device {
	t.Helper()
	var devices []kubeapi.Device
	var nodeUID string
	client, err := kubeapi.New(kubeapi.Options{Address: api.URL, Dial: api.Dial})
	if err != nil {
		t.Fatal(err)
	}
	defer client.CloseIdleConnections()
	if n, err := client.Node(t.Context(), node); err == nil {
		nodeUID = n.Metadata.UID
	}
	all := api.Slices()
	slices.SortFunc(all, func(x, y kubeapi.ResourceSlice) int {
		return len(x.Metadata.Name)*1000 - len(y.Metadata.Name)*1000 + strings.Compare(x.Metadata.Name, y.Metadata.Name)
	})
	for i, s := range all {
		want := kubeapi.ResourcePool{Name: node, Generation: all[0].Spec.Pool.Generation, ResourceSliceCount: int64(len(all))}
		if s.Spec.Pool != want || s.Spec.NodeName != node || s.Spec.Driver != resourceslice.Driver {
			t.Errorf("slice %s: %+v, want pool %+v", s.Metadata.Name, s.Spec.Pool, want)
		}
		if name := fmt.Sprintf("%s-%s-%d", node, resourceslice.Driver, i); s.Metadata.Name != name {
			t.Errorf("slice %q, want %q", s.Metadata.Name, name)
		}
		if o := s.Metadata.OwnerReferences; len(o) != 1 || nodeUID != "" && o[0].UID != nodeUID || o[0].Kind != "Node" || o[0].Name != node || o[0].Controller == nil || !*o[0].Controller {
			t.Errorf("slice %s has the owner %+v, want the Node %s", s.Metadata.Name, o, nodeUID)
		}
		devices = append(devices, s.Spec.Devices...)
	}
	return devices
}

// want checks the devices in the API.
func (a *agent) want(devices ...kubeapi.Device) {
	a.t.Helper()
	if diff := cmp.Diff(devices, a.published(), cmpopts.EquateEmpty()); diff != "" {
		a.t.Errorf("published (-want +got):\n%s\n%s", diff, a.log.String())
	}
}

func wantDevices(t *testing.T, want, got []kubeapi.Device) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// wantWrites checks the writes since the last call: "create 0". Creates come at the same time: they are in the order of their names.
func (a *agent) wantWrites(want ...string) {
	a.t.Helper()
	got := []string{}
	for _, r := range a.api.Writes() {
		got = append(got, strings.TrimSpace(r.Verb+" "+strings.TrimPrefix(r.Name, node+"-"+resourceslice.Driver+"-")))
	}
	for i := range got {
		n := i
		for n < len(got) && strings.HasPrefix(got[n], "create ") {
			n++
		}
		slices.Sort(got[i:n])
	}
	if !slices.Equal(got, want) {
		a.t.Errorf("writes %q, want %q\n%s", got, want, a.log.String())
	}
	a.api.ForgetRequests()
}

// wantLog checks how many lines of the log have a text.
func (a *agent) wantLog(text string, times int) {
	a.t.Helper()
	if n := strings.Count(a.log.String(), text); n != times {
		a.t.Errorf("%q is %d times in the log, want %d:\n%s", text, n, times, a.log.String())
	}
}

// wantProblem checks that the status has a reason with these texts.
func (a *agent) wantProblem(texts ...string) {
	a.t.Helper()
	s := a.Published()
	for _, text := range texts {
		if !strings.Contains(s.Problem, text) {
			a.t.Errorf("problem %q, want %q", s.Problem, text)
		}
	}
	if len(texts) == 0 && s.Problem != "" {
		a.t.Errorf("problem %q", s.Problem)
	}
}
