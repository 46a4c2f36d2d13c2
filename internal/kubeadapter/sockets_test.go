package kubeadapter

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

func TestStaleSocketsAreRemoved(t *testing.T) {
	r := newRig(t)
	r.startKubelet() // removes all sockets
	listen := func(name string) *net.UnixListener {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(r.dir, name), Net: "unix"})
		r.must(err)
		l.SetUnlinkOnClose(false)
		return l
	}
	r.must(listen("tandem-gpu-dead.sock").Close())
	r.must(listen("nvidia-gpu.sock").Close())
	running := listen("tandem-gpu-running.sock")
	defer func() { _ = running.Close() }()
	r.must(os.WriteFile(filepath.Join(r.dir, "tandem-notes"), nil, 0o600))
	r.offer(coretest.GPUs(1))
	r.start()
	r.awaitReady()
	for name, want := range map[string]bool{
		"tandem-gpu-dead.sock": false, "nvidia-gpu.sock": true, "tandem-gpu-running.sock": true, "tandem-notes": true,
	} {
		if _, err := os.Stat(filepath.Join(r.dir, name)); (err == nil) != want {
			t.Errorf("%s: %v, want a file: %v", name, err, want)
		}
	}
}

func TestServesWithoutAKubelet(t *testing.T) {
	r := newRig(t)
	r.offer(coretest.GPUs(1))
	r.start(func(a *Adapter) { a.opts.KubeletSocket, a.kubelet.socket = "", "" })
	r.awaitReady()
	if s := r.sockets(); !slices.Equal(s, []string{"tandem-gpu.sock"}) {
		t.Errorf("sockets %v, want a constant name", s)
	}
	r.must(r.adapter.Alive(r.ctx))
}

func TestSocketPathTooLong(t *testing.T) {
	r := startRig(t, buildInventory(coretest.GPUs(1), core.DefaultConfig()), func(a *Adapter) { a.kubelet.dir = filepath.Join(a.kubelet.dir, strings.Repeat("d", 90)) })
	r.await("a reason", func() bool {
		err := r.adapter.Ready()
		return err != nil && strings.Contains(err.Error(), "longer than 107 bytes")
	})
}

// Two resource names of 63 characters differ in the last one. The paths of their sockets differ and are short enough for the
// kubelet's default directory, also after many incarnations.
func TestLongestResourceNames(t *testing.T) {
	r := newRig(t)
	r.startKubelet()
	c := core.DefaultConfig()
	var resources []string
	for i, end := range []string{"a", "b"} {
		pool := strings.Repeat("x", 63-len(vendor)-1) + end
		resources = append(resources, vendor+pool)
		c.Policy.Rules = append(c.Policy.Rules, inventory.Rule{
			Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(i)}}, Pool: pool,
		})
	}
	r.src.Set(buildInventory(coretest.GPUs(2), c))
	r.start()
	for _, resource := range resources {
		r.awaitHealthy(resource, 1)
	}
	names := r.sockets()
	if len(names) != 2 || names[0] == names[1] {
		t.Errorf("sockets %v", names)
	}
	for _, name := range names {
		if n := len(v1beta1.DevicePluginPath + name); n+len("999999") > maxSocketPath {
			t.Errorf("%s: a path of %d characters", name, n)
		}
	}
}
