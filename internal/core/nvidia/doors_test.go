package nvidia

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
)

// moved are GPUs that were at the indices 0, 1, 2 and so on and are now where is said; -1 for one that is silent.
func moved(now ...int) (met moves, silent []identity) {
	for was, index := range now {
		if index >= 0 {
			met = append(met, move{was, identity{index: index}})
		} else {
			silent = append(silent, identity{index: was, err: &StuckError{Call: "nvmlDeviceGetUUID", At: core.Node}})
		}
	}
	return met, silent
}

func TestStrangers(t *testing.T) {
	for _, c := range []struct {
		name  string
		count int
		now   []int // by former index
		moved bool
		free  []int
		at    []int // of the silent; -1 for adrift
	}{
		{"nobody", 0, nil, false, nil, nil},
		{"first reading", 3, nil, true, []int{0, 1, 2}, nil},
		{"at rest", 3, []int{0, 1, 2}, false, nil, nil},
		{"one more", 4, []int{0, 1, 2}, true, []int{3}, nil},
		{"silent at rest", 3, []int{0, -1, 2}, false, nil, []int{1}},
		{"one of two silent is back", 4, []int{0, 1, -1, 3}, false, nil, []int{2}},
		{"pulled in front of it", 3, []int{0, 1, -1, 2}, true, []int{}, []int{-1}},
		{"another pulled", 2, []int{-1, 1}, true, nil, []int{0}},
		{"pulled in front of the last", 2, []int{0, 1, -1}, true, nil, []int{-1}},
		{"one more behind", 4, []int{0, -1, 2}, true, []int{3}, []int{1}},
		{"one more behind the last", 4, []int{0, 1, -1}, true, []int{2, 3}, []int{-1}},
		{"two silent together", 4, []int{0, -1, -1, 3}, true, nil, []int{1, 2}},
		{"two silent together, one was pulled", 3, []int{0, -1, -1, 2}, true, []int{1}, []int{-1, -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			met, silent := moved(c.now...)
			free, blind := strangers(c.count, c.moved, met, silent)
			var at []int
			for _, s := range silent {
				if s.adrift {
					s.index = -1
				}
				at = append(at, s.index)
			}
			if !slices.Equal(free, c.free) || !slices.Equal(at, c.at) || (blind != nil) != slices.Contains(at, -1) {
				t.Errorf("free %v, silent at %v, %v", free, at, blind)
			}
		})
	}
}
