package main

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// words are the arguments of a command.
type words []string

// checkNumbers checks that the first n words, or all if there are fewer, are numbers.
func checkNumbers(w words, n int) error {
	for _, word := range w[:min(n, len(w))] {
		if _, err := strconv.ParseUint(word, 0, 32); err != nil {
			return fmt.Errorf("%q is not a number", word)
		}
	}
	return nil
}

// number is a word that checkNumbers has checked.
func (w words) number(i int) uint64 {
	n, _ := strconv.ParseUint(w[i], 0, 32)
	return n
}

func (w words) slot() int { return int(w.number(0)) }

func (w words) at(i int) []simdriver.At {
	if len(w) <= i {
		return nil
	}
	at := simdriver.At{GI: int(w.number(i)), CI: simdriver.WholeInstance}
	if len(w) > i+1 {
		at.CI = int(w.number(i + 1))
	}
	return []simdriver.At{at}
}

func plain(do func(*simdriver.Machine) error) command {
	return command{run: func(m *simdriver.Machine, _ words, _ io.Writer) error { return do(m) }}
}

func onSlot(do func(*simdriver.Machine, int) error) command {
	return command{1, 1, 1, func(m *simdriver.Machine, w words, _ io.Writer) error { return do(m, w.slot()) }}
}

func onVersion(do func(*simdriver.Machine, string) error) command {
	return command{1, 1, 0, func(m *simdriver.Machine, w words, _ io.Writer) error { return do(m, w[0]) }}
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
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		if _, err := fmt.Fprintf(out, "%10d %s\n", counts[name], name); err != nil {
			return err
		}
	}
	return nil
}

// mig reads "1g.10gb x7" as seven times the profile before it.
func mig(m *simdriver.Machine, w words, _ io.Writer) error {
	slot := w.slot()
	switch w[1] {
	case "off":
		return m.MIGOff(slot)
	case "empty":
		return m.SetMIG(slot)
	}
	var profiles []string
	for _, word := range w[1:] {
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
