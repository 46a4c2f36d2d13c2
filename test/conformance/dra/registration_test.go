package dra

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/conformance/sandbox"
)

// sockets are those in the kubelet's directory for registration.
func (n *node) sockets() []string {
	paths, err := filepath.Glob(filepath.Join(n.registryDir(), "*.sock"))
	n.Must(err)
	return paths
}

func (n *node) dial(socket string) *grpc.ClientConn {
	n.Helper()
	c, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	n.Must(err)
	n.Cleanup(func() { _ = c.Close() })
	return c
}

// The kubelet gives GetInfo a second. Nothing in it may depend on the driver of the GPUs.
func TestCase01RegistrationWhileTheDriverHangsOrIsAbsent(t *testing.T) {
	for name, fault := range map[string][]string{"hangs": {"hang", "all", "*"}, "absent": {"hide"}, "answers": {"show"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, "h100x8")
			n.Sim(fault...)
			n.Must(os.MkdirAll(n.registryDir(), 0o750))
			a := n.startAgent()
			n.Await("a socket", func() bool { return len(n.sockets()) == 1 })
			ctx, cancel := context.WithTimeout(t.Context(), plenty)
			defer cancel()
			client := registerapi.NewRegistrationClient(n.dial(n.sockets()[0]))
			info, err := client.GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
			n.Must(err)
			if info.Type != registerapi.DRAPlugin || info.Name != driverName {
				t.Errorf("%v", info)
			}
			want := []string{"v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"}
			if got := info.SupportedVersions; len(got) == 0 || got[0] != want[0] {
				t.Errorf("versions %v: the kubelet takes the first that it has", got)
			}
			for _, v := range want {
				if !slices.Contains(info.SupportedVersions, v) {
					t.Errorf("versions %v, want also %s", info.SupportedVersions, v)
				}
			}
			n.startKubelet().awaitRegistered(t)
			p := n.pod("gone", claim("never-prepared", result("gpu", "gpu-unknown")))
			if answer, err := n.callUnprepare(request(claim("never-prepared"))); err != nil || answer["uid-of-never-prepared"].GetError() != "" {
				t.Errorf("Unprepare: %v %v", answer, err)
			}
			n.removePod(p)
			n.Sim("heal") // a call that hangs ends
			n.End(a, syscall.SIGTERM)
		})
	}
}

func TestCase02KubeletComesLater(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	n.Must(os.RemoveAll(n.kubeletDir))
	a := n.startAgent()
	n.awaitDevices(8) // slices need no kubelet
	n.Must(os.MkdirAll(n.kubeletDir, 0o750))
	k := n.startKubelet()
	k.awaitRegistered(t)
	n.Must(n.prepare(n.pod("first", claim("first", result("gpu", deviceName(n.UUIDs()[0]))))))
	if got := k.registry.succeeded(); len(got) != 1 {
		t.Errorf("registrations %v", got)
	}
	n.End(a, syscall.SIGTERM)
}

// The socket of a killed process stays. The next process removes it, and no other.
func TestCase03KilledAndStartedAgain(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	foreign := filepath.Join(n.registryDir(), "other.example.com-reg.sock")
	l, err := net.Listen("unix", foreign)
	n.Must(err)
	defer func() { _ = l.Close() }()
	old := n.ownSockets()
	n.End(a, syscall.SIGKILL)
	if got := n.ownSockets(); !slices.Equal(got, old) {
		t.Fatalf("sockets of a killed process %v, want %v", got, old)
	}
	began := time.Now()
	n.startAgent()
	n.kubelet.awaitRegistrations(t, 2)
	t.Logf("registered %v after the start of the next process", since(began))
	if got := n.ownSockets(); len(got) != 1 {
		t.Errorf("sockets %v", got)
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
}

// ownSockets are those of agents.
func (n *node) ownSockets() []string {
	return slices.DeleteFunc(n.sockets(), func(path string) bool { return !strings.Contains(filepath.Base(path), "tandem") })
}

func TestCase04Terminated(t *testing.T) {
	t.Parallel()
	n, a := newReady(t, "h100x8", 8)
	_, before, _ := n.api.state()
	began := time.Now()
	if code := n.End(a, syscall.SIGTERM); code != 0 {
		t.Errorf("exit code %d", code)
	}
	t.Logf("ended after %v", since(began))
	if got := n.ownSockets(); len(got) != 0 {
		t.Errorf("sockets %v", got)
	}
	n.kubelet.registry.await(t, "the kubelet's end of the registration", func(all []registration) bool { return all[len(all)-1].ended })
	if _, after, _ := n.api.state(); len(after) != len(before) {
		t.Errorf("the slices changed: %d events, before %d", len(after), len(before))
	}
	if _, err := n.driverOrError(); err == nil {
		t.Error("the driver is still registered")
	}
}

// A kubelet that refuses the driver: the reason is where operators look, and the agent makes no attempts of its own.
func TestCase05Refused(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	k := n.startKubelet()
	k.registry.refuse(errors.New("drivers are not welcome"))
	address := heldAddress(t)
	a := n.startAgent("--http-address=" + address)
	k.registry.await(t, "three attempts", func(all []registration) bool { return len(all) >= 3 })
	n.AwaitLog(a, "drivers are not welcome")
	if code, text := n.get("http://" + address + "/readyz"); code == http.StatusOK || !strings.Contains(text, "drivers are not welcome") {
		t.Errorf("/readyz: %d %s", code, text)
	}
	if text := n.inspect(); !strings.Contains(text, "drivers are not welcome") {
		t.Errorf("inspect has no reason:\n%s", text)
	}
	k.registry.refuse(nil)
	k.awaitRegistered(t)
	n.Await("/readyz", func() bool { code, _ := n.get("http://" + address + "/readyz"); return code == http.StatusOK })
	if log := n.Read(a.Log); strings.Count(log, "drivers are not welcome") > 10 {
		t.Errorf("the log repeats the refusal:\n%s", log)
	}
}

func (n *node) get(url string) (int, string) {
	r, err := http.Get(url)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = r.Body.Close() }()
	text, err := io.ReadAll(r.Body)
	n.Must(err)
	return r.StatusCode, string(text)
}

// Two processes at a time, as in a rolling update with maxSurge: the newer one gets the calls, and the end of either loses nothing.
func TestCase06TwoInstances(t *testing.T) {
	for _, leaves := range []string{"older", "newer"} {
		t.Run(leaves+" leaves", func(t *testing.T) {
			t.Parallel()
			n, older := newReady(t, "h100x8", 8)
			ids := n.UUIDs()
			p := n.pod("before", claim("before", result("gpu", deviceName(ids[0]))))
			n.Must(n.prepare(p))
			newer := n.startAgent()
			both := n.kubelet.awaitRegistrations(t, 2)
			if both[0].endpoint == both[1].endpoint {
				t.Errorf("one endpoint: %v", both)
			}
			n.Must(n.prepare(n.pod("meanwhile", claim("meanwhile", result("gpu", deviceName(ids[1]))))))
			_, before, _ := n.api.state()
			n.End(map[string]*agent{"older": older, "newer": newer}[leaves], syscall.SIGTERM)
			n.kubelet.registry.await(t, "one registration less", func(all []registration) bool { return all[len(all)-1].ended })
			n.Await("health after the end of a stream", func() bool {
				return strings.HasPrefix(n.health(p)["k8s.device-plugin.nvidia.com/gpu="+ids[0]], "Healthy")
			})
			n.Must(n.prepare(n.pod("after", claim("after", result("gpu", deviceName(ids[2]))))))
			n.Must(n.finish(p)) // prepared by the older one
			if _, after, _ := n.api.state(); slices.ContainsFunc(after[len(before):], func(e sliceEvent) bool { return e.kind == "DELETED" }) {
				t.Error("slices were deleted")
			}
		})
	}
}

// Linux' limit for the path of a socket is 107 bytes, and the kubelet's directory may be anywhere.
func TestCase07LengthOfTheSocketsPath(t *testing.T) {
	t.Parallel()
	n := newNode(t, "h100x8")
	name := len("/plugins_registry/") + len("gpu.nvidia.com-tandem-01234567-reg.sock")
	base := n.kubeletDir
	dir := func(length int) string { return base + "/" + strings.Repeat("d", length-name-len(base)-1) }
	n.kubeletDir = dir(107)
	k := n.startKubelet()
	n.startAgent()
	if r := k.awaitRegistered(t); len(r.endpoint) != 107 {
		t.Fatalf("%s has %d bytes: the test wants 107", r.endpoint, len(r.endpoint))
	}
	k.stop()
	n.kubeletDir, n.stateDir = dir(108), n.stateDir+"2"
	n.recordAPI(inventory.DRA)
	n.Must(os.MkdirAll(n.registryDir(), 0o750))
	a := n.startAgent()
	n.AwaitLog(a, "107")
	if got := n.sockets(); len(got) != 0 {
		t.Errorf("sockets %v", got)
	}
	t.Log(sandbox.LastLines(n.Read(a.Log), 3))
}
