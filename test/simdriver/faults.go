package simdriver

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Target is the GPU that a fault concerns.
type Target string

// All reaches every GPU and also the calls that name none, nvmlInit_v2 and nvmlEventSetWait_v2 among them.
const All Target = "all"

// GPU is the GPU in a slot, its MIG devices included.
func GPU(slot int) Target { return Target(strconv.Itoa(slot)) }

// Always is Fail's times without an end.
const Always = 0

// Fail makes a call answer with a code such as "GPU_IS_LOST" or "UNKNOWN":
// the next times calls in each process, or Always. call is a name, every
// version of it when it has no _vN, or a pattern with *.
func (m *Machine) Fail(t Target, call, code string, times int) error {
	line := fmt.Sprintf("fail %s %s %s", t, call, code)
	if times != Always {
		line += fmt.Sprintf(" times=%d", times)
	}
	return m.addFault(line)
}

// Hang makes a call not return until Heal.
func (m *Machine) Hang(t Target, call string) error {
	return m.addFault(fmt.Sprintf("hang %s %s", t, call))
}

// Slow makes a call take at least d, in whole milliseconds.
func (m *Machine) Slow(t Target, call string, d time.Duration) error {
	return m.addFault(fmt.Sprintf("slow %s %s %dms", t, call, d.Milliseconds()))
}

// Heal removes the faults of the targets, or all faults; hung calls go on.
func (m *Machine) Heal(targets ...Target) error {
	return m.locked(func() error {
		lines, err := m.Faults()
		if err != nil {
			return err
		}
		lines = slices.DeleteFunc(lines, func(line string) bool {
			words := strings.Fields(line)
			return len(targets) == 0 || (len(words) > 1 && slices.Contains(targets, Target(words[1])))
		})
		return replace(m.path("faults"), strings.Join(append(lines, ""), "\n"))
	})
}

// Faults are the lines of the fault file.
func (m *Machine) Faults() ([]string, error) { return m.lines("faults") }

// addFault gives the line an id, so that the same fault set again counts anew.
func (m *Machine) addFault(line string) error {
	if len(strings.Fields(line)) < 3 || strings.ContainsAny(line, "\n#") {
		return fmt.Errorf("fault %q: cannot be written", line)
	}
	return m.locked(func() error {
		lines, err := m.Faults()
		if err != nil {
			return err
		}
		line += fmt.Sprintf(" id=%d", time.Now().UnixNano())
		return replace(m.path("faults"), strings.Join(append(lines, line, ""), "\n"))
	})
}
