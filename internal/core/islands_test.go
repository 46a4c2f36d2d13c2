package core_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
)

// linked is a machine whose GPUs are joined by these pairs.
func linked(pairs ...string) *core.Inventory {
	var links []core.Link
	for _, p := range pairs {
		links = append(links, core.Link{A: core.DeviceID(p[:1]), B: core.DeviceID(p[1:]), NVLinks: 4})
	}
	links = append(links, core.Link{A: "a", B: "z", Path: core.PathSingleSwitch}) // near, but not by NVLink
	return core.Build(core.NewSnapshot(core.Snapshot{Links: links}), core.Ledger{}, core.DefaultConfig())
}

func TestIslands(t *testing.T) {
	for name, tc := range map[string]struct {
		pairs []string
		want  [][]core.DeviceID
	}{
		"none":                 {nil, nil},
		"bridges":              {[]string{"ab", "cd"}, [][]core.DeviceID{{"a", "b"}, {"c", "d"}}},
		"a switch":             {[]string{"ab", "ac", "bc"}, [][]core.DeviceID{{"a", "b", "c"}}},
		"over others":          {[]string{"ab", "bc", "cd", "xy"}, [][]core.DeviceID{{"a", "b", "c", "d"}, {"x", "y"}}},
		"joined by the last":   {[]string{"ab", "cd", "bd"}, [][]core.DeviceID{{"a", "b", "c", "d"}}},
		"the least comes last": {[]string{"bc", "de", "ce", "ad"}, [][]core.DeviceID{{"a", "b", "c", "d", "e"}}},
	} {
		for range 10 {
			rand.Shuffle(len(tc.pairs), func(i, j int) { tc.pairs[i], tc.pairs[j] = tc.pairs[j], tc.pairs[i] })
			if diff := cmp.Diff(tc.want, linked(tc.pairs...).Islands()); diff != "" {
				t.Errorf("%s, %v (-want +got):\n%s", name, tc.pairs, diff)
			}
		}
	}
	if (*core.Inventory)(nil).Islands() != nil {
		t.Error("nothing has islands")
	}
}

// Against the definition, on random machines: two GPUs are in one island if and only if links lead from one to the
// other.
func TestIslandsOnAnyMachine(t *testing.T) {
	for range 500 {
		var pairs []string
		reach := [8][8]bool{}
		for i := range 8 {
			for j := i + 1; j < 8; j++ {
				if rand.IntN(8) == 0 {
					pairs = append(pairs, string([]byte{byte('a' + i), byte('a' + j)}))
					reach[i][j], reach[j][i] = true, true
				}
			}
		}
		for k := range 8 {
			for i := range 8 {
				for j := range 8 {
					reach[i][j] = reach[i][j] || reach[i][k] && reach[k][j]
				}
			}
		}
		islands := linked(pairs...).Islands()
		of := func(i int) int {
			return slices.IndexFunc(islands, func(s []core.DeviceID) bool { return slices.Contains(s, core.DeviceID(rune('a'+i))) })
		}
		for i := range 8 {
			for j := range 8 {
				if i != j && reach[i][j] != (of(i) >= 0 && of(i) == of(j)) {
					t.Fatalf("%v: %v", pairs, islands)
				}
			}
		}
	}
}
