package live

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// GPUs of the machine a100-mig.
const (
	sevenths = 4 // seven times 1g.10gb
	mixed    = 5 // several profiles
)

const (
	mig1g       = "nvidia.com/mig-1g.10gb"
	mig2g       = "nvidia.com/mig-2g.20gb"
	mig7g       = "nvidia.com/mig-7g.80gb"
	gpuResource = "nvidia.com/gpu"
)

func seven(profile string) []string { return slices.Repeat([]string{profile}, 7) }

func three(profile string) []string { return slices.Repeat([]string{profile}, 3) }

// The layout of a GPU changes while work is on one of its instances. With the default configuration both orchestrators have the
// new layout within 5 s, and nothing else changes.
func TestMIGLayouts(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.MIGOff(mixed)) // its instances have the resources that are to become empty
	s := startScene(t, m)
	rest := without(s.Units(), s.UnitsOf(sevenths)...)
	s.checkAllocatable("before", s.UnitsOf(sevenths)[2])
	layout := func(profiles []string) func() error { return func() error { return m.SetMIG(sevenths, profiles...) } }
	for _, c := range []struct {
		what     string
		do       func() error
		silent   []string // resources without an update
		capacity map[string]int
	}{
		{"7 x 1g.10gb to 3 x 2g.20gb", layout(three("2g.20gb")), []string{gpuResource, mig7g}, map[string]int{mig1g: 0, mig2g: 3}},
		{"and back", layout(seven("1g.10gb")), []string{gpuResource, mig7g}, map[string]int{mig1g: 7, mig2g: 0}},
		{"MIG mode disabled", func() error { return m.MIGOff(sevenths) }, []string{mig2g, mig7g}, map[string]int{mig1g: 0, gpuResource: 6}},
		{"MIG mode enabled", layout(seven("1g.10gb")), []string{mig2g, mig7g}, map[string]int{mig1g: 7, gpuResource: 5}},
	} {
		before, attributes := s.UnitsOf(sevenths), s.groupsOf(rest)
		took := s.change(change{what: c.what, do: c.do, unchanged: rest, silent: c.silent})
		checkTime(t, c.what, took, 5*time.Second)
		// A group has an attribute for unhealthy devices, which the former ones are until they are removed.
		s.eventually(c.what+": the groups of other GPUs are as before", func() bool { return maps.Equal(s.groupsOf(rest), attributes) })
		s.checkNotReservable(c.what, without(before, s.UnitsOf(sevenths)...)...)
		for resource, n := range c.capacity {
			s.checkCapacity(c.what, resource, n)
		}
	}
	s.AwaitOnly("former units are removed", s.Units())
	s.checkCapacity("at the end", mig2g, 0)
}

// An instance in use can't be destroyed: it stays, and the layout of the rest of its GPU changes.
func TestInstanceInUseStays(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	s := startScene(t, m)
	rest := without(s.Units(), s.UnitsOf(sevenths)...)
	used := s.UnitsOf(sevenths)[6] // in the seventh slice: there is room for three times two before it
	s.checkAllocatable("work starts", used)
	relayout := func(text string) string {
		return editGPU(text, sevenths, func(lines []string) []string {
			lines = slices.DeleteFunc(lines, func(line string) bool {
				return strings.HasPrefix(line, "instance") && !strings.Contains(line, used)
			})
			for i := range 3 {
				lines = append(lines, fmt.Sprintf("instance = 2g.20gb gi=%d ci=0 start=%d uuid=MIG-11111111-2222-4333-8444-00000000000%d", 3+i, 2*i, i))
			}
			return lines
		})
	}
	s.change(change{
		what: "6 x 1g.10gb to 3 x 2g.20gb beside the one in use",
		do: func() error {
			return errors.Join(s.rewrite(relayout), m.Event(sevenths, simdriver.EventMIGConfigChange, 0))
		},
		unchanged: append(rest, used), silent: []string{gpuResource, mig7g, "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb.me"},
	})
}

// With the default configuration, changes without an event of the driver reach both orchestrators within 5 s: the kernel
// module's folders under /proc/driver/nvidia show them.
func TestChangesWithoutEvents(t *testing.T) {
	if !inOwnProcess(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.Change(sevenths, "events = 0x3e9f")) // without nvmlEventMigConfigChange
	s := startScene(t, m)
	rest := without(s.Units(), s.UnitsOf(sevenths)...)
	for _, c := range []change{
		{what: "another layout", do: func() error { return m.SetMIG(sevenths, three("2g.20gb")...) }, unchanged: rest},
		{what: "a GPU is added", do: func() error { return m.Add(8) }, unchanged: rest},
	} {
		checkTime(t, c.what, s.change(c), 5*time.Second)
	}
	c := change{what: "the GPU is removed", units: s.Units(), unhealthy: []string{s.UUID(8)}, do: func() error { return m.Remove(8) }, unchanged: rest}
	checkTime(t, c.what, s.change(c), 5*time.Second)
}

// editGPU changes the lines of a GPU's section.
func editGPU(text string, slot int, change func(lines []string) []string) string {
	head := fmt.Sprintf("[gpu %d]\n", slot)
	before, rest, found := strings.Cut(text, head)
	if !found {
		return text
	}
	section, after, more := strings.Cut(rest, "\n[")
	if more {
		after = "\n[" + after
	}
	lines := change(strings.Split(strings.TrimRight(section, "\n"), "\n"))
	return before + head + strings.Join(lines, "\n") + "\n" + after
}
