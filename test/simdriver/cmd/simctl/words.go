package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// words are a command's arguments; the first that cannot be read is kept in err.
type words struct {
	args []string
	err  error
}

func (w *words) number(i int) uint64 {
	n, err := strconv.ParseUint(w.args[i], 0, 32)
	if err != nil && w.err == nil {
		w.err = fmt.Errorf("%q is not a number", w.args[i])
	}
	return n
}

func (w *words) at(i int) []simdriver.At {
	if len(w.args) <= i {
		return nil
	}
	at := simdriver.At{GI: int(w.number(i)), CI: simdriver.WholeInstance}
	if len(w.args) > i+1 {
		at.CI = int(w.number(i + 1))
	}
	return []simdriver.At{at}
}

func (w *words) unless(do func() error) error {
	if w.err != nil {
		return w.err
	}
	return do()
}

func plain(do func(*simdriver.Machine) error) func(*simdriver.Machine, words, io.Writer) error {
	return func(m *simdriver.Machine, _ words, _ io.Writer) error { return do(m) }
}

func onSlot(do func(*simdriver.Machine, int) error) func(*simdriver.Machine, words, io.Writer) error {
	return func(m *simdriver.Machine, w words, _ io.Writer) error {
		slot := w.number(0)
		return w.unless(func() error { return do(m, int(slot)) })
	}
}

func version(do func(*simdriver.Machine, string) error) func(*simdriver.Machine, words, io.Writer) error {
	return func(m *simdriver.Machine, w words, _ io.Writer) error { return do(m, w.args[0]) }
}

func holders(m *simdriver.Machine, _ words, out io.Writer) error {
	pids, err := m.Holders()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // it may have ended
		if _, err := fmt.Fprintln(out, pid, strings.TrimSpace(string(name))); err != nil {
			return err
		}
	}
	return nil
}

func lines(read func(*simdriver.Machine) ([]string, error)) func(*simdriver.Machine, words, io.Writer) error {
	return func(m *simdriver.Machine, _ words, out io.Writer) error {
		all, err := read(m)
		for _, line := range all {
			if _, err := fmt.Fprintln(out, line); err != nil {
				return err
			}
		}
		return err
	}
}

func show(m *simdriver.Machine, _ words, out io.Writer) error {
	text, err := os.ReadFile(m.Root + "/machine.conf")
	if err == nil {
		_, err = out.Write(text)
	}
	return err
}

func calls(m *simdriver.Machine, _ words, out io.Writer) error {
	counts, err := m.Calls()
	if err != nil {
		return err
	}
	names := make([]string, 0, len(counts))
	for name := range counts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if _, err := fmt.Fprintf(out, "%10d %s\n", counts[name], name); err != nil {
			return err
		}
	}
	return nil
}

// mig reads "1g.10gb x7" as seven times the profile before it.
func mig(m *simdriver.Machine, w words, _ io.Writer) error {
	slot := int(w.number(0))
	if w.err != nil {
		return w.err
	}
	switch w.args[1] {
	case "off":
		return m.MIGOff(slot)
	case "empty":
		return m.SetMIG(slot)
	}
	var profiles []string
	for _, word := range w.args[1:] {
		times, ok := strings.CutPrefix(word, "x")
		if !ok || len(profiles) == 0 {
			profiles = append(profiles, word)
			continue
		}
		n, err := strconv.Atoi(times)
		if err != nil || n < 1 {
			return fmt.Errorf("%q: want xCOUNT", word)
		}
		for range n - 1 {
			profiles = append(profiles, profiles[len(profiles)-1])
		}
	}
	return m.SetMIG(slot, profiles...)
}
