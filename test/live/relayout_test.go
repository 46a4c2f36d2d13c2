package live

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// noMIGEvent is the event mask of a driver that does not tell of layouts (nvml.h: nvmlEventMigConfigChange).
const noMIGEvent = "events = 0x3e9f"

// A real driver destroys no instance that is in use: the one that works stays, and the rest is cut anew.
func TestBusyInstanceStays(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	s := stage(t, m)
	s.settles("start", time.Now(), s.units())
	rest := without(s.units(), s.unitsOf(sevenths)...)
	works := s.unitsOf(sevenths)[6] // in the seventh slice: three times two are free before it
	s.granted("work starts", works)
	since, began := s.mark(), time.Now()
	s.rewrite(func(text string) string {
		return editGPU(text, sevenths, func(lines []string) []string {
			lines = slices.DeleteFunc(lines, func(line string) bool {
				return strings.HasPrefix(line, "instance") && !strings.Contains(line, works)
			})
			for i := range 3 {
				lines = append(lines, fmt.Sprintf("instance = 2g.20gb gi=%d ci=0 start=%d uuid=MIG-11111111-2222-4333-8444-00000000000%d", 3+i, 2*i, i))
			}
			return lines
		})
	})
	must(t, m.Event(sevenths, simdriver.EventMIGConfigChange, 0))
	s.settles("6 x 1g.10gb to 3 x 2g.20gb beside the one that works", began, s.units())
	s.undisturbed("re-layout", since, append(rest, works))
	s.silent("re-layout", since, gpuResource, mig7g, "nvidia.com/mig-3g.40gb", "nvidia.com/mig-1g.10gb.me")
	s.granted("work starts again", append(s.unitsOf(sevenths), works)...)
}

// Without an event of the driver's it takes the next full reading.
func TestLayoutWithoutEvent(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.Change(sevenths, noMIGEvent))
	s := stage(t, m, hasty)
	s.settles("start", time.Now(), s.units())
	rest, old := without(s.units(), s.unitsOf(sevenths)...), s.unitsOf(sevenths)
	since, began := s.mark(), time.Now()
	must(t, m.SetMIG(sevenths, three("2g.20gb")...))
	s.refuses("the old layout, told by nobody, read every 0.5 s", began, old)
	s.settles("the new layout", began, s.units())
	s.undisturbed("re-layout", since, rest)
	s.granted("re-layout", s.unitsOf(sevenths)...)
}

// The same with the settings of an operator who has set none.
func TestLayoutWithoutEventByDefault(t *testing.T) {
	takesLong(t)
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.Change(sevenths, noMIGEvent))
	s := stage(t, m)
	s.settles("start", time.Now(), s.units())
	since, began, old := s.mark(), time.Now(), s.unitsOf(sevenths)
	rest := without(s.units(), old...)
	must(t, m.SetMIG(sevenths, three("2g.20gb")...))
	s.refuses("the old layout, told by nobody, read every minute", began, old)
	d := s.settles("the new layout", began, s.units())
	s.undisturbed("re-layout", since, rest)
	promised(t, "a full reading and what follows", d.most(), core.DefaultConfig().Rescan+5*time.Second)
}

// What an operator sees should not depend on whether the driver tells of it: there are signs of a new layout
// that can be looked at more often than a full reading is made, such as the folders that the kernel module
// keeps below /proc/driver/nvidia.
func TestLayoutWithoutEventIsSeenSoon(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	must(t, m.Change(sevenths, noMIGEvent))
	s := stage(t, m)
	s.settles("start", time.Now(), s.units())
	began := time.Now()
	must(t, m.SetMIG(sevenths, three("2g.20gb")...))
	d := s.settles("the new layout, told by nobody", began, s.units())
	promised(t, "a new layout", d.most(), 5*time.Second)
	began = time.Now()
	must(t, m.Add(8))
	d = s.settles("a new GPU, told by nobody", began, s.units())
	promised(t, "a new GPU", d.most(), 5*time.Second)
}

// The driver may give the ID of an instance that is gone to the next one in its place, which is of another
// profile. To the kubelet it leaves one resource and comes to another, and must not vanish from the first
// while that hands it out.
func TestSameIDOtherProfile(t *testing.T) {
	if !apart(t) {
		return
	}
	m := simdriver.Start(t, "a100-mig")
	s := stage(t, m, hasty)
	s.settles("start", time.Now(), s.units())
	id := s.unitsOf(busy)[0]
	began := time.Now()
	s.rewrite(func(text string) string {
		return editGPU(text, busy, func(lines []string) []string {
			for i, line := range lines {
				lines[i] = strings.Replace(line, "7g.80gb gi=0", "2g.20gb gi=3", 1)
			}
			return lines
		})
	})
	must(t, m.Event(busy, simdriver.EventMIGConfigChange, 0))
	s.renamed = []string{id}
	s.until("the kubelet has it as another resource", func() bool { r, _ := s.resources(); return r[id] == mig2g })
	s.until("Nomad has it in another group", func() bool { return strings.HasSuffix(s.nomad.last().names()[id], "2g.20gb") })
	s.settles("another profile under the same ID", began, s.units())
	s.granted("another profile", id)
	s.until("the resource that it was of is empty", func() bool { n, _ := s.kubelet.Capacity(mig7g); return n == 0 })
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
