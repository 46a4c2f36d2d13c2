package dra

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// A test of the answers on one machine with eight GPUs; each case has GPUs of its own.

func TestCase08OneManyDuplicateAndNoClaims(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	one := claim("one", result("gpu", deviceName(ids[0])))
	two := claim("two", result("a", deviceName(ids[1])), result("b", deviceName(ids[2])))
	n.pod("both", one, two)
	if answer, err := n.call(); err != nil || len(answer) != 0 {
		t.Errorf("no claims: %v %v", answer, err)
	}
	answer, err := n.call(request(one), request(two), request(one))
	n.Must(err)
	want := map[string][]*drapb.Device{
		string(one.UID): {{RequestNames: []string{"gpu"}, PoolName: nodeName, DeviceName: deviceName(ids[0])}},
		string(two.UID): {
			{RequestNames: []string{"a"}, PoolName: nodeName, DeviceName: deviceName(ids[1])},
			{RequestNames: []string{"b"}, PoolName: nodeName, DeviceName: deviceName(ids[2])},
		},
	}
	if len(answer) != len(want) {
		t.Errorf("answers %v", answer)
	}
	for uid, devices := range want {
		got := answer[uid]
		if got.GetError() != "" || len(got.GetDevices()) != len(devices) {
			t.Fatalf("%s: %v", uid, got)
		}
		for i, d := range got.GetDevices() {
			if w := devices[i]; d.DeviceName != w.DeviceName || d.PoolName != w.PoolName || !slices.Equal(d.RequestNames, w.RequestNames) || shareID(d) != "" {
				t.Errorf("%s: %v, want %v", uid, d, w)
			}
			n.mustResolve(cdiNames(d))
		}
	}
}

// The answer is read from the record: the same bytes, without API server, GPU or a second allocation.
func TestCase09RepeatOfAPreparedClaim(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	c := claim("same", result("gpu", deviceName(n.UUIDs()[3])))
	n.run(n.pod("first", c))
	first, err := n.call(request(c))
	n.Must(err)
	record := n.stat(c)
	n.api.goAway()
	n.Sim("lose", "3")
	for range 3 {
		again, err := n.call(request(c))
		n.Must(err)
		if !slices.Equal(marshal(t, first), marshal(t, again)) {
			t.Errorf("%v, first %v", again, first)
		}
	}
	if now := n.stat(c); !os.SameFile(record, now) || record.ModTime() != now.ModTime() {
		t.Error("the record was written again")
	}
}

func marshal(t *testing.T, answer map[string]*drapb.NodePrepareResourceResponse) []byte {
	t.Helper()
	text, err := json.Marshal(answer)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// recordPath is the file of a prepared claim.
func (n *node) recordPath(c *resourceapi.ResourceClaim) string {
	return filepath.Join(n.stateDir, "dra", "claims", string(c.UID)+".json")
}

func (n *node) stat(c *resourceapi.ResourceClaim) os.FileInfo {
	n.Helper()
	info, err := os.Stat(n.recordPath(c))
	n.Must(err)
	return info
}

// record is what the agent has stored of a claim; false if there is nothing.
func (n *node) record(c *resourceapi.ResourceClaim) (r prepared.Claim, ok bool) {
	n.Helper()
	text, err := os.ReadFile(n.recordPath(c))
	if os.IsNotExist(err) {
		return r, false
	}
	n.Must(err)
	n.Must(json.Unmarshal(text, &r))
	return r, true
}

// Each error is a line of its own, in the event of the pod.
func TestCase15ClaimsThatCanNotBePrepared(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	ids := n.UUIDs()
	gpu := deviceName(ids[0])
	foreign, pool := result("gpu", gpu), result("gpu", gpu)
	foreign.Driver, pool.Pool = "other.example.com", "node-2"
	unallocated := claim("unallocated")
	unallocated.Status.Allocation = nil
	recreated := claim("recreated", result("gpu", gpu))
	n.api.putClaim(recreated)
	recreated = recreated.DeepCopy()
	recreated.UID = "the-former-uid"
	missing := claim("missing")
	texts := map[string]string{}
	for _, c := range []struct {
		claim *resourceapi.ResourceClaim
		want  []string
	}{
		{unallocated, []string{"not allocated"}},
		{claim("foreign", foreign), []string{"no device of gpu.nvidia.com"}},
		{claim("pool", pool), []string{"node-2", nodeName}},
		{claim("unknown", result("gpu", "gpu-00000000")), []string{"gpu-00000000", "not offered"}},
		{recreated, []string{"uid-of-recreated", "the-former-uid"}},
		{missing, []string{"missing", "not found"}},
	} {
		if c.claim != recreated && c.claim != missing {
			n.api.putClaim(c.claim)
		}
		answer, err := n.call(request(c.claim))
		n.Must(err)
		text := answer[string(c.claim.UID)].GetError()
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("%s: %q, want %q in it", c.claim.Name, text, want)
			}
		}
		if strings.Contains(text, "\n") || text == "" {
			t.Errorf("%s: %q is not one line", c.claim.Name, text)
		}
		if before, twice := texts[text]; twice {
			t.Errorf("%s and %s: both %q", before, c.claim.Name, text)
		}
		texts[text] = c.claim.Name
		if _, ok := n.record(c.claim); ok {
			t.Errorf("%s has a record", c.claim.Name)
		}
		t.Log(text)
	}
}

func TestCase17TwoClaimsOnOneGPU(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[0])
	first, second := claim("first", result("gpu", gpu)), claim("second", result("gpu", gpu))
	p := n.pod("first", first)
	n.run(p)
	late := n.pod("second", second)
	if err := n.prepare(late); err == nil || !strings.Contains(err.Error(), "held by other work") || strings.Contains(err.Error(), "first") {
		t.Errorf("%v", err)
	}
	n.Must(n.finish(p))
	n.run(late)
}

// Of claims that come at once for one GPU, one gets it.
func TestCase17RaceForOneGPU(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[0])
	var claims []*resourceapi.ResourceClaim
	for i := range 16 {
		c := claim(fmt.Sprintf("rival-%d", i), result("gpu", gpu))
		n.api.putClaim(c)
		claims = append(claims, c)
	}
	var mu sync.Mutex
	var winners []string
	var all sync.WaitGroup
	for _, c := range claims {
		all.Go(func() {
			answer, err := n.call(request(c))
			mu.Lock()
			defer mu.Unlock()
			switch text := answer[string(c.UID)].GetError(); {
			case err != nil:
				t.Error(err)
			case text == "":
				winners = append(winners, c.Name)
			case !strings.Contains(text, "held by"):
				t.Error(text)
			}
		})
	}
	all.Wait()
	if len(winners) != 1 {
		t.Errorf("%v have one GPU", winners)
	}
}

// A GPU that a claim has becomes one with MIG instances: they are of the same hardware.
func TestCase17GPUAndItsInstances(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	k := n.startKubelet()
	n.startAgent("--mig-strategy=mixed")
	k.awaitRegistered(t)
	n.awaitDevices(8)
	whole := claim("whole", result("gpu", deviceName(n.UUIDs()[0])))
	p := n.pod("whole", whole)
	n.run(p)
	n.Sim("mig", "0", "1g.10gb")
	var instance string
	n.api.await("an instance", func(all []*resourceapi.ResourceSlice) bool {
		for name := range devicesOf(t, all) {
			if strings.HasPrefix(name, "mig-") {
				instance = name
			}
		}
		return instance != ""
	})
	part := n.pod("part", claim("part", result("gpu", instance)))
	if err := n.prepare(part); err == nil || !strings.Contains(err.Error(), "held by other work") || strings.Contains(err.Error(), "whole") {
		t.Errorf("%v", err)
	}
	if _, listed := n.api.devices()[deviceName(n.UUIDs()[0])]; !listed {
		t.Error("the allocated GPU left the slice")
	}
	n.Must(n.finish(p))
	n.run(part)
	n.api.await("the GPU that no claim has any more", func(all []*resourceapi.ResourceSlice) bool {
		_, listed := devicesOf(t, all)[deviceName(n.UUIDs()[0])]
		return !listed
	})
}

const shared = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}\n"

func (n *node) config(text string) string {
	n.Helper()
	path := filepath.Join(n.TempDir(), "config.yaml")
	n.Must(os.WriteFile(path, []byte(text), 0o600))
	return "--config-file=" + path
}

func TestCase18SharesOfOneDevice(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	k := n.startKubelet()
	n.startAgent(n.config(shared))
	k.awaitRegistered(t)
	n.awaitDevices(8)
	gpu := deviceName(n.UUIDs()[0])
	share := func(name string) *resourceapi.ResourceClaim {
		r := result("gpu", gpu)
		r.ShareID = ptr.To(types.UID("share-of-" + name))
		return claim(name, r)
	}
	var last []string
	for i := range 4 {
		c := share(fmt.Sprintf("share-%d", i))
		last = n.run(n.pod(c.Name, c))
		answer, err := n.call(request(c))
		n.Must(err)
		devices := answer[string(c.UID)].GetDevices()
		if len(devices) != 1 || shareIDs && shareID(devices[0]) != "share-of-"+c.Name {
			t.Errorf("%s: %v", c.Name, devices)
		}
	}
	n.mustResolve(last)
	fifth := share("fifth")
	if err := n.prepare(n.pod("fifth", fifth)); err == nil || !strings.Contains(err.Error(), "shares") {
		t.Errorf("a fifth share of four: %v", err)
	}
}

func TestCase19AdminAccess(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	gpu := deviceName(n.UUIDs()[0])
	admin := func(name string) *resourceapi.ResourceClaim {
		r := result("gpu", gpu)
		r.AdminAccess = ptr.To(true)
		return claim(name, r)
	}
	before := n.run(n.pod("before", admin("before"))) // holds nothing
	holder := n.run(n.pod("holder", claim("holder", result("gpu", gpu))))
	after := n.run(n.pod("after", admin("after"))) // beside the holder
	n.mustResolve(holder)
	if !slices.Equal(before, holder) || !slices.Equal(after, holder) {
		t.Errorf("%v, %v, want %v", before, after, holder)
	}
}

// The scheduler writes "request/subrequest"; the kubelet looks for "request".
func TestCase20FirstAvailable(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	p := n.pod("prioritized", claim("prioritized", result("gpu/large", deviceName(n.UUIDs()[0]))))
	p.Spec.Containers[0].Resources.Claims[0].Request = "gpu"
	names := n.run(p)
	if len(names) != 1 {
		t.Fatalf("the container has %v", names)
	}
	n.mustResolve(names)
}

// opaque is a configuration of a claim.
func opaque(driver, parameters string, source resourceapi.AllocationConfigSource, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{
		Source: source, Requests: requests,
		DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
			Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
		}},
	}
}

// On an exclusive GPU with --api dra: what NVIDIA's configurations mean there.
func TestCase21OpaqueConfigurations(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	const version = `"apiVersion":"resource.nvidia.com/v1beta1"`
	none := `{` + version + `,"kind":"GpuConfig"}`
	slicing := `{` + version + `,"kind":"GpuConfig","sharing":{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Default"}}}`
	mps := `{` + version + `,"kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":50}}}`
	const class, own resourceapi.AllocationConfigSource = resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	for i, c := range []struct {
		name    string
		configs []resourceapi.DeviceAllocationConfiguration
		want    string // in the error; "" = prepared
	}{
		{"no-sharing", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, none, own)}, ""},
		{"foreign-driver", []resourceapi.DeviceAllocationConfiguration{opaque("other.example.com", `{"any":"thing"}`, own)}, ""},
		{"time-slicing", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, slicing, own)}, ""},
		{"mps", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, mps, own)}, "MPS"},
		{"other-request", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, mps, own, "other")}, ""},
		{"own-request", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, mps, own, "gpu")}, "MPS"},
		{"claim-before-class", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, none, own), opaque(driverName, mps, class)}, ""},
		{"class-only", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, mps, class)}, "MPS"},
		{"field", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, `{`+version+`,"kind":"GpuConfig","sharring":{}}`, own)}, "sharring"},
		{"kind", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, `{`+version+`,"kind":"VfioDeviceConfig"}`, own)}, "VfioDeviceConfig"},
		{"json", []resourceapi.DeviceAllocationConfiguration{opaque(driverName, `"text"`, own)}, "opaque"},
	} {
		held := claim(c.name, result("gpu", deviceName(n.UUIDs()[i%8])))
		held.Status.Allocation.Devices.Config = c.configs
		p := n.pod(c.name, held)
		err := n.prepare(p)
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		t.Logf("%s: %v", c.name, err)
		n.Must(n.finish(p))
	}
}

// Unprepare has only names: what is unknown is done, and a disk that can't be written is an error until it can.
func TestCase22Unprepare(t *testing.T) {
	t.Parallel()
	n, _ := newReady(t, "h100x8", 8)
	c := claim("held", result("gpu", deviceName(n.UUIDs()[0])))
	p := n.pod("held", c)
	n.run(p)
	unknown := claim("unknown")
	answer, err := n.callUnprepare(request(unknown), request(unknown))
	if err != nil || len(answer) != 1 || answer[string(unknown.UID)].GetError() != "" {
		t.Errorf("unknown claim: %v %v", answer, err)
	}
	thaw := n.freeze(n.stateDir)
	if err := n.finish(p); err == nil || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("on a disk that can't be written: %v", err)
	}
	other := n.pod("other", claim("other", result("gpu", deviceName(n.UUIDs()[1]))))
	if err := n.prepare(other); err == nil || !strings.Contains(err.Error(), "read-only file system") {
		t.Errorf("on a disk that can't be written: %v", err)
	}
	thaw()
	n.Must(n.finish(p))
	n.run(other)
	if _, ok := n.record(c); ok {
		t.Error("the record is still there")
	}
}
