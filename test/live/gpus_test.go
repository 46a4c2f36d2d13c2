package live

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// A GPU is added, removed and restored, and replaced in its slot. The others are not affected, although their indices change;
// so none is if only the indices change.
func TestGPUsAreAddedAndRemoved(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	s := startScene(t, simdriver.Start(t, "h100x8"), shortIntervals)
	all := s.Units()
	s.change(change{what: "a GPU is added", do: func() error { return s.Add(8) }, unchanged: all})
	all = append(all, s.UUID(8))
	if now := s.Nomad.Devices(); now[all[8]].Name != now[all[0]].Name {
		t.Errorf("it is in group %q, the others are in %q", now[all[8]].Name, now[all[0]].Name)
	}

	removed := all[3]
	var keys []string
	for _, key := range []string{"uuid", "pci", "minor", "numa"} {
		value, err := s.Get(3, key)
		must(t, err)
		if value != "" {
			keys = append(keys, key+" = "+value)
		}
	}
	rest := without(all, removed)
	s.change(change{what: "a GPU is removed", do: func() error { return s.Remove(3) }, units: all, unhealthy: []string{removed}, unchanged: rest})
	if v := s.Nomad.Devices()[removed]; !strings.HasPrefix(v.Reason, "LOST lost: ") {
		t.Errorf("removed: %+v", v)
	}
	s.change(change{what: "it is added again, after the others", do: func() error { return s.Add(3, keys...) }, units: all, unchanged: rest})

	rest = without(all, all[5])
	s.change(change{what: "another GPU is in its slot", unchanged: rest, do: func() error {
		return s.Set(5, "uuid", "GPU-0e0e0e0e-1111-4222-8333-444444444444")
	}})
	all = s.Units()
	s.change(change{what: "the indices are reversed", units: all, unchanged: all, do: func() error {
		err := s.rewrite(reversed)
		s.awaitReading()
		return err
	}})
	s.AwaitOnly("former units are removed", all)
}

// reversed is a machine with the reverse order of GPUs. Slots are in the sections that move.
func reversed(text string) string {
	head, rest, _ := strings.Cut(text, "[gpu ")
	gpus, tail, _ := strings.Cut(rest, "[links]")
	sections := strings.Split(gpus, "[gpu ")
	slices.Reverse(sections)
	for i, section := range sections {
		sections[i] = "[gpu " + strings.TrimRight(section, "\n") + "\n\n"
	}
	return head + strings.Join(sections, "") + "[links]" + tail
}

// awaitReading waits until a reading that began after now has ended.
func (s *scene) awaitReading() {
	s.T.Helper()
	count := func() uint64 { return s.calls("nvmlDeviceGetName") } // only readings call it
	slots, err := s.Slots()
	must(s.T, err)
	enough := count() + uint64(2*len(slots)) // the rest of the current reading, and the next one
	s.eventually("another reading", func() bool { return count() >= enough })
}

// calls counts the calls of a function so far.
func (s *scene) calls(name string) uint64 {
	s.T.Helper()
	calls, err := s.Calls()
	must(s.T, err)
	return calls[name]
}
