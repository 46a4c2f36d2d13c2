package hostwatch

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
)

// shortDir is a folder whose path leaves room for the name of a socket (unix(7): 107 bytes).
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// startDaemon stands in for the MPS control daemon of a pool. Its socket is of the type that the real one has.
func startDaemon(t *testing.T, root, pool string) *net.UnixListener {
	t.Helper()
	dir := filepath.Join(root, domain, pool, "pipe")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "control")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func TestAskSocket(t *testing.T) {
	root := shortDir(t)
	path := filepath.Join(root, domain, "gpu.mps", "pipe", "control")
	if err := ask(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("nothing is there: %v", err)
	}
	l := startDaemon(t, root, "gpu.mps")
	for range 3 {
		if err := ask(path); err != nil {
			t.Errorf("it is there: %v", err)
		}
	}
	if err := l.SetDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if c, err := l.Accept(); err == nil {
		t.Errorf("the daemon has noticed: %v", c.RemoteAddr())
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ask(path); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("it was killed, and its socket is still there: %v", err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	stream, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if err := ask(path); err != nil {
		t.Errorf("a daemon with a stream socket: %v", err)
	}
	if err := stream.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(path); err == nil {
		t.Error("a file answers")
	}
}

func TestAskFIFO(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(path); !errors.Is(err, syscall.ENXIO) {
		t.Errorf("nobody reads: %v", err)
	}
	reader, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	if err := ask(path); err != nil {
		t.Errorf("somebody reads: %v", err)
	}
}

// Before anybody knows the GPUs those are asked that the policy may mean; then those on offer, and no others.
func TestPoolsThatAreAsked(t *testing.T) {
	mps := core.Sharing{Mode: core.MPS, Replicas: 2, OnePerRequest: true}
	slices3 := core.Sharing{Mode: core.TimeSlicing, Replicas: 3}
	cfg := core.DefaultConfig()
	cfg.Policy = core.Policy{
		Rules: []core.Rule{
			{Select: core.Selector{IDs: []core.DeviceID{coretest.GPU(0)}}, Pool: "named", Sharing: &mps},
			{Select: core.Selector{IDs: []core.DeviceID{coretest.GPU(1)}}, Pool: "others", Sharing: &mps, Reserve: "left to nomad"},
			{Select: core.Selector{IDs: []core.DeviceID{coretest.GPU(2)}}, Sharing: &slices3},
			{Select: core.Selector{IDs: []core.DeviceID{coretest.GPU(3)}}, Sharing: &mps},
		},
		Shares: []core.Share{{Pool: "gpu", Rename: "gpu.few", Sharing: mps}, {Pool: "mig-1g.10gb", Sharing: mps}, {Pool: "x", Sharing: slices3}},
	}
	root := shortDir(t)
	startDaemon(t, root, "mig-2g.20gb.mps")
	startDaemon(t, root, "elsewhere")
	d := daemonsOf(cfg.Policy, root)
	state := core.NewState(cfg)
	if got := d.of(state.Inventory); !slices.Equal(got, []string{"gpu.few", "mig-1g.10gb", "mig-2g.20gb.mps", "named"}) {
		t.Errorf("before: %v", got)
	}
	if got := d.of(state.Read(cfg, now, coretest.GPUs(4)).Inventory); !slices.Equal(got, []string{"gpu.mps", "named"}) {
		t.Errorf("after: %v", got)
	}
	if got := daemonsOf(core.Policy{}, root).of(state.Inventory); len(got) != 0 {
		t.Errorf("nothing is shared, and %v are asked", got)
	}
}

func BenchmarkAsk(b *testing.B) {
	dir, err := os.MkdirTemp("", "mps")
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "control")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	for b.Loop() {
		if err := ask(path); err != nil {
			b.Fatal(err)
		}
	}
}
