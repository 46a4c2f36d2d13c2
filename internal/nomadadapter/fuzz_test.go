package nomadadapter

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/setting"
)

// FuzzConfigBlock: a block that is accepted gives valid settings, the same each time it is read; each error of a refused block
// names a key.
func FuzzConfigBlock(f *testing.F) {
	for _, keys := range []map[string]any{
		{},
		{"enabled": true, "ignored_gpu_ids": []string{"GPU-1", "MIG-2"}, "fingerprint_period": "90s", "driver_root": "/run/nvidia/driver"},
		{"xids": map[string]string{"63": "ignore", "999": "unhealthy"}, "recovery_checks": 3, "simulation": true, "state_dir": ""},
		{"xids": []map[string]any{{"63": "ignore"}}, "recovery_limit": -1.5, "health_mode": nil},
		{"fingerprint_period": "999ms", "dev_root": "x", "ignored_gpu_ids": []string{""}},
		{"mig_strategy": "single", "group_by": "numa", "mps_root": "/mps/../mps"},
		{"mig_strategy": "double", "group_by": "", "mps_root": "mps"},
		{"enabled": 1, "xids": 7, "health_period": []string{"1m"}},
	} {
		var raw []byte
		if err := base.MsgPackEncode(&raw, keys); err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Add([]byte{0xdf, 0xff, 0xff, 0xff, 0xff})                                       // a map of 4294967295 keys
	f.Add([]byte{0x81, 0xa4, 'x', 'i', 'd', 's', 0xdd, 0xff, 0xff, 0xff, 0xff, 0xc0}) // a list as long
	f.Fuzz(func(t *testing.T, raw []byte) {
		b, err := decode(raw)
		if err != nil || b.PolicyFile != "" { // files have a fuzzer of their own
			return
		}
		got, _, err := b.Read()
		again, _, errAgain := b.Read()
		if diff := cmp.Diff(got, again); diff != "" || (err == nil) != (errAgain == nil) {
			t.Errorf("read twice: %v, %v\n%s", err, errAgain, diff)
		}
		if err != nil {
			joined, ok := err.(interface{ Unwrap() []error })
			if !ok {
				t.Fatalf("%v: want joined errors", err)
			}
			for _, e := range joined.Unwrap() {
				if problem, ok := errors.AsType[*setting.Error](e); !ok || problem.Key == "" || problem.Remedy == "" {
					t.Errorf("%v", e)
				}
			}
			return
		}
		if err := got.Core.Validate(); err != nil || got.Core.Rescan < time.Second || got.MPSRoot[0] != '/' {
			t.Errorf("%+v: %v", got, err)
		}
		for _, root := range []string{got.Core.Roots.Driver, got.Core.Roots.Dev, got.Core.Roots.Sys, got.Core.Roots.Proc} {
			if root != "" && root[0] != '/' {
				t.Errorf("root %q", root)
			}
		}
	})
}

// FuzzReserve: a reservation has the requested devices and no others, or the error names each one that is refused.
func FuzzReserve(f *testing.F) {
	a, b, unhealthy := string(coretest.GPU(0)), string(coretest.GPU(1)), string(coretest.GPU(2))
	for _, ids := range []string{"", a, b + "\n" + a + "\n" + a, unhealthy, a + "\n" + unhealthy + "\nGPU-unknown", "\n", a + ",", strings.ToLower(a)} {
		f.Add(ids)
	}
	s := newFixture(f)
	s.Source.Set(nodeInventory(coretest.GPUs(3), lost(2)))
	s.currentRun()
	f.Fuzz(func(t *testing.T, text string) {
		ids := strings.Split(text, "\n")
		want := map[string]bool{}
		var refused []string
		for _, id := range ids {
			if want[id] = true; id != a && id != b {
				refused = append(refused, id)
			}
		}
		r, err := s.Reserve(ids)
		switch {
		case len(refused) > 0 && err == nil:
			t.Errorf("%q: %v is reserved", ids, refused)
		case len(refused) > 0:
			for _, id := range refused {
				if !strings.Contains(err.Error(), id) {
					t.Errorf("%q: %v does not name %q", ids, err, id)
				}
			}
		case err != nil:
			t.Errorf("%q: %v", ids, err)
		default:
			got := slices.Sorted(slices.Values(strings.Split(r.Envs[inventory.VisibleDevices], ",")))
			if !slices.Equal(got, slices.Sorted(maps.Keys(want))) || len(r.Mounts) > 0 {
				t.Errorf("%q: %+v", ids, r)
			}
		}
	})
}

// FuzzGroupsFile: any file of group names is refused, or can be written and read again, and gives no name to two groups.
func FuzzGroupsFile(f *testing.F) {
	given := assignment{by: config.GroupByNVLink}.with(nodeInventory(linked(4, [2]int{0, 1})))
	text, err := encodeGroups(given, "boot 1")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(text), "boot 1")
	f.Add(string(text), "boot 2")
	f.Add(strings.ReplaceAll(string(text), `"announced": true`, `"announced": false`), "")
	f.Fuzz(func(t *testing.T, text, boot string) {
		boot = strings.ToValidUTF8(boot, "?") // a boot id is a UUID
		n, was, err := decodeGroups([]byte(text), boot)
		if err != nil {
			return
		}
		if boot == "" {
			boot = was
		}
		inv := nodeInventory(linked(4, [2]int{2, 3}))
		n = assignment{by: config.GroupByNVLink}.merge(n).with(inv)
		if of := groupByDevice(t, groups(inv, n)); len(of) != inv.Len() {
			t.Errorf("%d of %d devices are in a group", len(of), inv.Len())
		}
		once, err := encodeGroups(n, boot)
		if err != nil {
			t.Fatal(err)
		}
		again, _, err := decodeGroups(once, boot)
		if err != nil {
			t.Fatalf("%v:\n%s", err, once)
		}
		if twice, _ := encodeGroups(again, boot); string(twice) != string(once) {
			t.Errorf("(-once +twice):\n%s", cmp.Diff(string(once), string(twice)))
		}
	})
}
