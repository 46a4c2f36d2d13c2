package hostwatch

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/assignment"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// offered are the GPUs that an agent which does not run would offer, by the API, and those that would take no work, by the reason.
func (h host) offered(name string, api inventory.API, inv *inventory.Inventory) map[int]string {
	cfg := h.cfg[name]
	cfg.API = api
	read := ReadOnce(Options{Agent: name, StateDir: h.dir, BootID: "b00t", Config: cfg, Log: slog.New(slog.DiscardHandler)}, inv)
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
func TestReadOnceHasTheAssignments(t *testing.T) {
	h := newHost(t)
	synctest.Test(t, func(t *testing.T) {
		h.cfg["nomad-gpu"], h.cfg["k8s-gpu"] = on(inventory.OverlapRefuse, 0, 1, 2), on(inventory.OverlapRefuse, 0, 1, 2)
		n := h.startNomad(t)
		pass(10 * time.Second)
		k := h.startKube(t, inventory.DevicePlugin, inventory.DRA)
		h.move(t, 1, inventory.DRA)
		h.move(t, 2, inventory.DevicePlugin)
		pass(assignment.DefaultSettle + 20*time.Second)
		k.expect(t, "after the moves", through{1: inventory.DRA, 2: inventory.DevicePlugin})
		h.plugins.set(coretest.GPU(2), "pod a")
		h.move(t, 2, inventory.Nomad)
		pass(10 * time.Second)
		n.end()
		k.end()
		path := filepath.Join(h.dir, assignment.FileName)
		before, err := os.ReadFile(path)
		must(t, err)

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
				delete(got, 0) // which nomad-gpu claims, without an entry
			}
			if len(got) != len(tc.want) || got[1] != tc.want[1] || got[2] != tc.want[2] {
				t.Errorf("%s: %v, want %v", name, got, tc.want)
			}
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
			t.Errorf("the file is %s, %v", after, err)
		}
		must(t, os.WriteFile(path, []byte("{"), 0o600))
		if got := h.offered("nomad-gpu", "", inv); slices.Contains([]string{got[0], got[1]}, "") {
			t.Errorf("with a broken file: %v take work", got)
		}
	})
}

func build(c inventory.Config) *inventory.Inventory {
	return inventory.Build(inventory.Input{Snapshot: coretest.GPUs(8), Config: c})
}
