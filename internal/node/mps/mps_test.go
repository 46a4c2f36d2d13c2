package mps

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestCheckSocket(t *testing.T) {
	root := coretest.ShortDir(t)
	pipe := Pipe(root, "gpu.mps")
	path := filepath.Join(pipe, ControlSocket)
	if _, err := FindControl(pipe); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing is there: %v", err)
	}
	l := coretest.MPSDaemon(t, Pipe(root, "gpu.mps"))
	for range 3 {
		if _, err := FindControl(pipe); err != nil {
			t.Errorf("it is there: %v", err)
		}
	}
	check.NoError(t, l.SetDeadline(time.Now().Add(10*time.Millisecond)))
	if c, err := l.Accept(); err == nil {
		t.Errorf("the daemon got a connection: %v", c.RemoteAddr())
	}
	l.SetUnlinkOnClose(false)
	check.NoError(t, l.Close())
	if _, err := FindControl(pipe); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("it was killed, and its socket is still there: %v", err)
	}
	check.NoError(t, os.Remove(path))
	stream, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	check.NoError(t, err)
	if _, err := FindControl(pipe); err != nil {
		t.Errorf("a daemon with a stream socket: %v", err)
	}
	check.NoError(t, stream.Close())
	check.NoError(t, os.WriteFile(path, nil, 0o600))
	if _, err := FindControl(pipe); err == nil {
		t.Error("a file answers")
	}
}

func TestCheckFIFO(t *testing.T) {
	pipe := t.TempDir()
	path := filepath.Join(pipe, ControlSocket)
	check.NoError(t, syscall.Mkfifo(path, 0o600))
	if _, err := FindControl(pipe); !errors.Is(err, syscall.ENXIO) {
		t.Errorf("no reader: %v", err)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	check.NoError(t, err)
	defer func() { _ = reader.Close() }()
	if _, err := FindControl(pipe); err != nil {
		t.Errorf("a reader: %v", err)
	}
}

// Before the GPUs are known the pools are those that the policy may select; then those of the inventory, and no others.
func TestPoolsOfDaemons(t *testing.T) {
	mps := inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true}
	slices3 := inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 3}
	cfg := core.DefaultConfig()
	cfg.Policy = inventory.Policy{
		Rules: []inventory.Rule{
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, Pool: "named", Sharing: &mps},
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(1)}}, Pool: "others", Sharing: &mps, NotOffered: "left to nomad"},
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(2)}}, Sharing: &slices3},
			{Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(3)}}, Sharing: &mps},
		},
		Shares: []inventory.Share{{Pool: "gpu", Rename: "gpu.few", Sharing: mps}, {Pool: "mig-1g.10gb", Sharing: mps}, {Pool: "x", Sharing: slices3}},
	}
	root := coretest.ShortDir(t)
	coretest.MPSDaemon(t, Pipe(root, "mig-2g.20gb.mps"))
	coretest.MPSDaemon(t, Pipe(root, "elsewhere"))
	d := Of(cfg.Policy, root, "")
	state := core.NewState(cfg)
	if got := d.Pools(state.Inventory); !slices.Equal(got, []string{"gpu.few", "mig-1g.10gb", "mig-2g.20gb.mps", "named"}) {
		t.Errorf("before: %v", got)
	}
	if got := d.Pools(state.Read(cfg, time.Now(), coretest.GPUs(4)).Inventory); !slices.Equal(got, []string{"gpu.mps", "named"}) {
		t.Errorf("after: %v", got)
	}
	if got := Of(inventory.Policy{}, root, "").Pools(state.Inventory); len(got) != 0 {
		t.Errorf("nothing is shared, but the pools are %v", got)
	}
}

func BenchmarkCheck(b *testing.B) {
	root := coretest.ShortDir(b)
	coretest.MPSDaemon(b, Pipe(root, "gpu.mps"))
	d := Of(inventory.Policy{}, root, "")
	for b.Loop() {
		if err := d.Check("gpu.mps"); err != nil {
			b.Fatal(err)
		}
	}
}
