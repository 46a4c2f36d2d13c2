package ownership

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// offered are the GPUs that an agent which does not run would offer, by the API, and those that would take no work, by the reason.
func (h host) offered(name string, api inventory.API, inv *inventory.Allocatable) map[int]string {
	cfg := h.cfg[name]
	cfg.API = api
	read := ReadOnce(Options{Agent: name, StateDir: h.dir, BootID: "b00t", Config: cfg, Log: slog.New(slog.DiscardHandler)}, core.State{Inventory: inv.Inventory, Allocatable: inv})
	cdi := &inventory.CDI{Kind: "k/gpu", Incarnation: inv.Incarnation()}
	for u := range inv.Units() {
		cdi.Defined = append(cdi.Defined, u.Device.ID)
	}
	read.CDI = cdi
	all := map[int]string{}
	for u := range inv.WithHost(read, cfg.Overlap).Units() {
		all[u.Device.Index] = string(u.API)
		if !u.Health.Schedulable() {
			all[u.Device.Index] = u.Health.Detail
		}
	}
	return all
}

// Without a running agent a GPU that another API has is not shown as offered, one that leaves takes no work, and nothing is changed.
func TestReadOnceHasTheOwners(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = on(inventory.OverlapRefuse, 0, 1, 2), on(inventory.OverlapRefuse, 0, 1, 2)
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin, inventory.DRA)
		h.move(t, 1, inventory.DRA)
		h.move(t, 2, inventory.DevicePlugin)
		pass(DefaultSettle + 20*time.Second)
		k.expect(t, "after the moves", through{1: inventory.DRA, 2: inventory.DevicePlugin})
		h.plugins.set(coretest.GPU(2), "pod default/a")
		h.move(t, 2, inventory.Nomad)
		pass(10 * time.Second)
		n.end()
		k.end()
		path := filepath.Join(h.dir, FileName)
		before, err := os.ReadFile(path)
		check.NoError(t, err)

		inv := build(h.cfg["k8s-gpu"].Config)
		for name, tc := range map[string]struct {
			agent string
			api   inventory.API
			want  map[int]string
		}{
			"k8s-gpu":          {"k8s-gpu", inventory.DevicePlugin, map[int]string{1: "dra", 2: "to nomad"}},
			"k8s-gpu with dra": {"k8s-gpu", inventory.DRA, map[int]string{1: "dra", 2: "to nomad"}},
			"nomad-gpu":        {"nomad-gpu", "", map[int]string{0: ""}},
		} {
			got := h.offered(tc.agent, tc.api, inv)
			if tc.agent == "k8s-gpu" {
				delete(got, 0) // which nomad-gpu offers, without an entry
			}
			if len(got) != len(tc.want) || got[1] != tc.want[1] || got[2] != tc.want[2] {
				t.Errorf("%s: %v, want %v", name, got, tc.want)
			}
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
			t.Errorf("the file is %s, %v", after, err)
		}
		check.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
		if got := h.offered("nomad-gpu", "", inv); slices.Contains([]string{got[0], got[1]}, "") {
			t.Errorf("with a broken file: %v take work", got)
		}
	})
}

// A lock that another process takes for a moment would be held for an agent that starts then.
func TestReadOnceOpensNoLockOfAnAgent(t *testing.T) {
	h := newHost(t)
	h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = on(inventory.OverlapRefuse, 1), on(inventory.OverlapRefuse, 1)
	synctest.Test(t, func(t *testing.T) {
		n := h.startNomad(t)
		pass(10 * time.Second)
		n.end()
	})
	of := Entry{Target: inventory.DevicePlugin, Owner: inventory.DevicePlugin, Epoch: 1, TargetRevision: 1}
	check.NoError(t, Write(h.dir, File{GPUs: map[gpu.DeviceID]Entry{coretest.GPU(1): of}}))
	lock := filepath.Join(h.dir, FolderName, "nomad-gpu.lock")
	check.NoError(t, os.WriteFile(lock, nil, 0o600)) // as a killed agent leaves it
	fd, err := syscall.InotifyInit1(syscall.IN_NONBLOCK | syscall.IN_CLOEXEC)
	check.NoError(t, err)
	defer func() { _ = syscall.Close(fd) }()
	_, err = syscall.InotifyAddWatch(fd, lock, syscall.IN_OPEN)
	check.NoError(t, err)

	got := h.offered("k8s-gpu", inventory.DevicePlugin, build(h.cfg["k8s-gpu"].Config))

	if want := "to device-plugin: waits for nomad-gpu"; got[1] != want {
		t.Errorf("GPU 1: %q, want %q", got[1], want)
	}
	if _, err := syscall.Read(fd, make([]byte, 4096)); !errors.Is(err, syscall.EAGAIN) {
		t.Errorf("the lock of nomad-gpu was opened (%v)", err)
	}
}

func build(c inventory.Config) *inventory.Allocatable {
	return inventory.Build(inventory.Input{Snapshot: coretest.GPUs(8), Config: c}).WithoutHost()
}
