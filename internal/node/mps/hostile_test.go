package mps

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// record writes a record of the daemon that serves a pool now.
func record(t *testing.T, stateDir, root, pool string, state State) {
	t.Helper()
	control, err := FindControl(Pipe(root, pool))
	check.NoError(t, err)
	text, err := json.Marshal(Record{State: state, Control: control})
	check.NoError(t, err)
	check.NoError(t, statefile.Write(RecordPath(stateDir, pool), text))
}

// Containers of a pool can write its pipe directory. Nothing there but the control file is read, whatever it is.
func TestFilesOfContainersAreNotRead(t *testing.T) {
	root, stateDir, pool := coretest.ShortDir(t), t.TempDir(), "gpu.mps"
	pipe := Pipe(root, pool)
	coretest.MPSDaemon(t, pipe)
	record(t, stateDir, root, pool, Ready)
	d := Of(inventory.Policy{}, root, stateDir)
	for _, path := range []string{
		filepath.Join(pipe, "nvidia-cuda-mps-control.pid"), filepath.Join(filepath.Dir(pipe), "tandem.json"),
	} {
		for name, put := range map[string]func() error{
			"a FIFO":          func() error { return syscall.Mkfifo(path, 0o644) },
			"a link":          func() error { return os.Symlink("/dev/zero", path) },
			"a sparse file":   func() error { return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, 1<<40)) },
			"another process": func() error { return os.WriteFile(path, []byte("1\n"), 0o644) },
			"another record":  func() error { return os.WriteFile(path, []byte(`{"state":"ending"}`), 0o644) },
		} {
			check.NoError(t, put())
			if err := d.Check(pool); err != nil {
				t.Errorf("%s at %s: %v", name, path, err)
			}
			check.NoError(t, os.Remove(path))
		}
	}
}

// A socket that has taken the place of a daemon's is no daemon, nor is a link to one.
func TestControlFileOfAContainer(t *testing.T) {
	root, stateDir, pool := coretest.ShortDir(t), t.TempDir(), "gpu.mps"
	pipe := Pipe(root, pool)
	path := filepath.Join(pipe, ControlSocket)
	daemon := coretest.MPSDaemon(t, pipe)
	daemon.SetUnlinkOnClose(false)
	record(t, stateDir, root, pool, Ready)
	d := Of(inventory.Policy{}, root, stateDir)
	check.NoError(t, d.Check(pool))

	check.NoError(t, os.Rename(path, path+".old"))
	check.NoError(t, os.Symlink(path+".old", path))
	if err := d.Check(pool); err == nil {
		t.Error("a link to the daemon's socket answers")
	}
	check.NoError(t, os.Remove(path))
	fake, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	check.NoError(t, err)
	defer func() { _ = fake.Close() }()
	if err := d.Check(pool); !errors.Is(err, errReplaced) {
		t.Errorf("another socket: %v", err)
	}
	check.NoError(t, os.Remove(RecordPath(stateDir, pool)))
	if err := d.Check(pool); err != nil {
		t.Errorf("a daemon of another program: %v", err)
	}
}

// The states of a record count by the record alone.
func TestStatesOfARecord(t *testing.T) {
	root, stateDir, pool := coretest.ShortDir(t), t.TempDir(), "gpu.mps"
	coretest.MPSDaemon(t, Pipe(root, pool))
	d := Of(inventory.Policy{}, root, stateDir)
	for state, want := range map[State]error{Starting: errStarting, Ending: errEnding, Ready: nil} {
		record(t, stateDir, root, pool, state)
		if err := d.Check(pool); !errors.Is(err, want) {
			t.Errorf("%s: %v", state, err)
		}
	}
}
