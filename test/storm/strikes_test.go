package storm

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// layouts are ways to cut a GPU up.
var layouts = [][]string{
	{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"},
	{"7g.80gb"},
	{"3g.40gb", "1g.10gb", "2g.20gb"},
	{"3g.40gb", "3g.40gb"},
	{"2g.20gb", "2g.20gb", "1g.10gb"},
}

// innocent are calls whose failure says nothing about health: numbers, links, words.
var innocent = []string{
	"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetEncoderUtilization",
	"nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetNvLinkRemotePciInfo",
	"nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetDisplayMode",
	"nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetSupportedEventTypes",
	"nvmlDeviceRegisterEvents", "nvmlDeviceGetSerial", "nvmlDeviceGetArchitecture", "nvmlDeviceGetBrand",
	"nvmlDeviceGetEccMode",
}

// telling are codes that say something about the whole GPU, whichever call gives them.
var telling = []string{"GPU_IS_LOST", "RESET_REQUIRED"}

func blame(s *slot) { s.blamed = true }

func failCall(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) {
		s.blamed = s.blamed || !slices.Contains(innocent, f.call) || slices.Contains(telling, f.code)
		s.blindfold(w.truth.bound)
		if slices.Contains(telling, f.code) {
			s.renewed() // so it looks when it answers again
		}
	})
	return w.Fail(simdriver.GPU(f.slot), f.call, f.code, f.count)
}

func hangCall(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.blamed = true; s.blindfold(w.truth.bound) })
	if err := w.Hang(simdriver.GPU(f.slot), f.call); err != nil {
		return err
	}
	if f.call == "*" || f.call == "nvmlDeviceGetUUID" { // the others are not made in each check
		w.truth.change(f.slot, func(s *slot) { s.begin(hung) })
	}
	return nil
}

// slowCall makes a call slow, though not slow enough to matter: nobody is to blame.
func slowCall(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.blindfold(w.truth.bound) })
	return w.Slow(simdriver.GPU(f.slot), f.call, f.took)
}

func healCalls(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) {
		s.end(hung)
		if slices.Contains(telling, f.code) {
			s.renewed()
		}
	})
	err := w.Heal(simdriver.GPU(f.slot))
	w.truth.readable(f.slot)
	return err
}

func lose(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	err := w.Lose(f.slot)
	w.truth.change(f.slot, func(s *slot) { s.begin(lost) })
	return err
}

func restore(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.end(lost); s.renewed() })
	return w.Restore(f.slot)
}

func unbind(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	err := w.Unbind(f.slot)
	w.truth.change(f.slot, func(s *slot) { s.begin(lost) })
	return err
}

func bind(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.end(lost); s.want(false) })
	return w.Bind(f.slot)
}

// pull takes a GPU out of its slot. Those behind it get other indices.
func pull(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	if err := w.keep(f.slot); err != nil {
		return err
	}
	w.moves++
	err := w.Remove(f.slot)
	w.truth.change(f.slot, func(s *slot) { s.begin(lost) })
	return err
}

// plug puts it back.
func plug(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.end(lost); s.want(false) })
	keys := w.pulled[f.slot]
	delete(w.pulled, f.slot)
	return w.putIn(f.slot, keys)
}

// exchange puts another GPU into the slot of one.
func exchange(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	if err := w.keep(f.slot); err != nil {
		return err
	}
	keys := w.pulled[f.slot]
	delete(w.pulled, f.slot)
	keys.lines = slices.DeleteFunc(keys.lines, func(l string) bool { return strings.HasPrefix(l, "uuid ") })
	w.truth.change(f.slot, func(s *slot) { s.want(false) })
	delete(w.fatals, f.slot)
	w.moves++
	if err := w.Remove(f.slot); err != nil {
		return err
	}
	return w.putIn(f.slot, keys)
}

// pulled is a GPU that lies on the table.
type pulled struct {
	lines []string
	cut   bool
}

// keep notes what a GPU is before it is pulled.
func (w *storm) keep(n int) error {
	var p pulled
	for _, key := range []string{"uuid", "pci", "numa", "minor", "module_id", "board_id", "serial"} {
		v, err := w.Get(n, key)
		if err != nil {
			return err
		}
		p.lines = append(p.lines, key+" = "+v)
	}
	mig, err := w.Get(n, "mig")
	p.cut = mig == "yes"
	w.pulled[n] = p
	return err
}

// putIn puts a GPU into an empty slot; one that was cut up is cut up anew.
func (w *storm) putIn(n int, p pulled) error {
	if err := w.Add(n, p.lines...); err != nil {
		return err
	}
	if p.cut {
		if err := w.SetMIG(n, layouts[0]...); err != nil {
			return err
		}
	}
	return w.own(n)
}

func want(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	err := w.Set(f.slot, "recovery_action", fmt.Sprint(f.count))
	w.truth.change(f.slot, func(s *slot) { s.want(true) })
	return err
}

func wantNothing(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.want(false) })
	return w.Set(f.slot, "recovery_action", "0")
}

func reset(w *storm, f *fault) error {
	w.truth.change(f.slot, func(s *slot) { s.blamed = true; s.want(false) })
	return w.Change(f.slot, "recovery_action = 0", "pcie_replays = 0", "energy = 0") // lost or not it stays
}

// resetAfter is the reset that a fatal XID calls for, as the driver has it done.
func resetAfter(w *storm, f *fault) error {
	if err := w.Set(f.slot, "recovery_action", "1"); err != nil {
		return err
	}
	w.truth.change(f.slot, func(s *slot) { s.want(false) })
	return w.Reset(f.slot)
}

func invalidate(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	return w.Invalidate(f.slot)
}

func cutAnew(w *storm, f *fault) error {
	w.truth.change(f.slot, blame)
	if err := w.SetMIG(f.slot, layouts[f.count]...); err != nil {
		return err
	}
	return w.own(f.slot)
}
