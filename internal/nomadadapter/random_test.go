package nomadadapter

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/hashicorp/nomad/plugins/base"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/check"
)

// randomInventory returns an inventory of up to six GPUs with random links, models and properties, under a random policy.
func randomInventory(random *rand.Rand) *inventory.Allocatable {
	s := onlyGPUs(coretest.GPUs(6), random.Perm(6)[:1+random.IntN(6)]...)
	s.Links = slices.DeleteFunc(slices.Clone(s.Links), func(gpu.Link) bool { return random.IntN(4) > 0 })
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Model = []string{"A", "B"}[random.IntN(2)]
		d.Memory = []uint64{0, 40 << 30, 80 << 30, 96 << 30}[random.IntN(4)]
		d.Compute = []gpu.Compute{{}, {Major: 8}, {Major: 9}}[random.IntN(3)]
		d.NUMANode = random.IntN(3) - 1
	}
	ways := []*inventory.Sharing{nil, timeSlicing(2), timeSlicing(3), byMPS(2)}
	pools := []string{"", "gpu", "gpu.shared", "gpu.mps", "fast", "A"}
	var p inventory.Policy
	for range random.IntN(3) {
		p.Rules = append(p.Rules, inventory.Rule{Select: selectGPUs(random.IntN(6), random.IntN(6)), Pool: pools[random.IntN(6)], Sharing: ways[random.IntN(4)]})
	}
	return inventoryUnder(p, s)
}

// On any node, under any policy, whatever is added and removed: each unit is in one valid group, no group has units of two
// pools, no name belongs to two groups, and the group of a complete key never changes. With restarts in between, within a
// boot, a key may have lost the model's name to another key that replaces it, and the file is always valid.
func TestGroupsOfRandomInventories(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		t.Run(fmt.Sprintf("restarts=%t", restarts), func(t *testing.T) {
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			for range 200 {
				checkRandomNode(t, random, restarts)
				if t.Failed() {
					t.Fatalf("seed %d", seed)
				}
			}
		})
	}
}

// placed is a unit with all that determines its group.
type placed struct {
	id  inventory.UnitID
	key groupKey
}

func checkRandomNode(t *testing.T, random *rand.Rand, restarts bool) {
	given := assignment{by: []config.GroupBy{config.GroupByNone, config.GroupByNUMA, config.GroupByNVLink}[random.IntN(3)]}
	groupOf, nameOf, boots := map[placed]string{}, map[groupKey]string{}, 0
	for range 20 {
		switch n := random.IntN(6); {
		case restarts && n == 0:
			given = afterRestart(t, given, fmt.Sprint(boots), fmt.Sprint(boots+1))
			boots++
			clear(groupOf)
			clear(nameOf)
		case restarts && n < 4:
			given = afterRestart(t, given, fmt.Sprint(boots), fmt.Sprint(boots))
		}
		inv, before := randomInventory(random), maps.Clone(given.names)
		next := given.with(inv)
		if !maps.Equal(before, given.names) {
			t.Fatalf("%v was changed to %v", before, given.names)
		}
		given = next
		units := checkGroups(t, inv, given)
		for id, group := range units {
			u, _ := inv.Unit(inventory.UnitID(id))
			k := given.keyOf(u)
			if !k.complete() {
				continue
			}
			k.topology = "" // a GPU must not move to another topology group
			if old, ok := groupOf[placed{u.ID, k}]; ok && old != group && (!restarts || !nameReassigned(given, old, given.keyOf(u))) {
				t.Errorf("%s was in %s and is in %s", id, old, group)
			}
			groupOf[placed{u.ID, k}] = group
		}
		for k, name := range given.names {
			if old, ok := nameOf[k]; k.complete() && ok && old != name && !restarts {
				t.Errorf("%+v was %q and is %q", k, old, name)
			}
			nameOf[k] = name
		}
		for k := range nameOf {
			if k.complete() && given.names[k] == "" && !restarts {
				t.Errorf("%+v has lost its name", k)
			}
		}
	}
}

// checkGroups returns the group of each unit, as type/name.
func checkGroups(t *testing.T, inv *inventory.Allocatable, given assignment) map[string]string {
	t.Helper()
	of, pools, taken := map[string]string{}, map[string]string{}, map[string]groupKey{}
	for _, g := range groups(inv, given) {
		if err := g.Validate(); err != nil {
			t.Error(err)
		}
		name := g.Type + "/" + g.Name
		if pools[name] != "" {
			t.Errorf("two groups are named %q", name)
		}
		for _, d := range g.Devices {
			u, _ := inv.Unit(inventory.UnitID(d.ID))
			if of[d.ID] != "" {
				t.Errorf("%s is in %s and in %s", d.ID, of[d.ID], name)
			}
			of[d.ID] = name
			if pool, ok := pools[name]; ok && pool != u.Pool {
				t.Errorf("%s has units of %s and of %s", name, pool, u.Pool)
			}
			pools[name] = u.Pool
		}
	}
	if len(of) != inv.Len() {
		t.Errorf("%d of %d units are in a group", len(of), inv.Len())
	}
	for k, name := range given.names {
		name = k.groupType + "/" + name
		if other, ok := taken[name]; ok {
			t.Errorf("%+v and %+v are both %q", k, other, name)
		}
		taken[name] = k
	}
	return of
}

// nameReassigned reports whether a group's name belongs to another key now.
func nameReassigned(a assignment, name string, k groupKey) bool {
	for other, assigned := range a.names {
		if other.groupType+"/"+assigned == name && other != k && other.conflicts(k) {
			return true
		}
	}
	return false
}

// Names and topology groups that are unused for forgetAfter boots are forgotten, and their number is bounded.
func TestUnusedNamesAreForgotten(t *testing.T) {
	given := assignment{by: config.GroupByNVLink}.with(nodeInventory(linked(2, [2]int{0, 1})))
	for n := range unusedBoots + 1 {
		if n == unusedBoots-1 && (len(given.names) < 2 || len(given.topology)+len(given.previous.topology) < 3) {
			t.Errorf("forgotten after %d boots: %v", n, given)
		}
		given = afterRestart(t, given, fmt.Sprint(n), fmt.Sprint(n+1))
		given = given.with(nodeInventory(onlyGPUs(withDevice(coretest.GPUs(3), 2, func(d *gpu.Device) { d.Model = "NVIDIA A2" }), 2)))
	}
	if len(given.topology) != 1 || len(given.previous.topology) != 0 || len(given.names) != 1 {
		t.Errorf("not forgotten: %+v", given)
	}
	for n := range 3 * maxNames {
		name := fmt.Sprint("pool", n)
		next, all := given.groups(inventoryUnder(inventory.Policy{Rules: []inventory.Rule{{Select: selectGPUs(0), Pool: name}}}, coretest.GPUs(1)))
		if given = next; len(given.names) > maxNames+1 || all[0].name != name {
			t.Fatalf("%d names", len(given.names))
		}
	}
	text, err := encodeGroups(given, "")
	if err != nil || len(text) > maxGroupFile {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}

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
		check.NoError(f, base.MsgPackEncode(&raw, keys))
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

// FuzzGroupsFile: any file of group names is refused, or can be written and read again, and gives no name to two groups.
func FuzzGroupsFile(f *testing.F) {
	given := assignment{by: config.GroupByNVLink}.with(nodeInventory(linked(4, [2]int{0, 1})))
	text, err := encodeGroups(given, "boot 1")
	check.NoError(f, err)
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
		check.NoError(t, err)
		again, _, err := decodeGroups(once, boot)
		if err != nil {
			t.Fatalf("%v:\n%s", err, once)
		}
		if twice, _ := encodeGroups(again, boot); string(twice) != string(once) {
			t.Errorf("(-once +twice):\n%s", cmp.Diff(string(once), string(twice)))
		}
	})
}
