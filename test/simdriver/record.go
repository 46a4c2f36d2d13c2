package simdriver

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
)

// Violations are the recorded misuses of the library, oldest first.
func (m *Machine) Violations() ([]string, error) { return m.lines("violations") }

// lines are those of a file of the machine; none if it does not exist.
func (m *Machine) lines(file string) ([]string, error) {
	text, err := os.ReadFile(m.path(file))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return slices.DeleteFunc(strings.Split(string(text), "\n"), func(s string) bool { return s == "" }), err
}

// ForgiveViolations empties the record: for tests that misuse on purpose.
func (m *Machine) ForgiveViolations() error { return os.WriteFile(m.path("violations"), nil, 0o666) }

// Calls counts NVML calls by name, of every process that has used the machine so far.
func (m *Machine) Calls() (map[string]uint64, error) { return m.count("") }

// CallsOf counts the NVML calls of one process.
func (m *Machine) CallsOf(pid int) (map[string]uint64, error) {
	return m.count(strconv.Itoa(pid) + ".")
}

// count adds up the counter files whose names, PID.NANOSECONDS, begin with prefix.
func (m *Machine) count(prefix string) (map[string]uint64, error) {
	total := map[string]uint64{}
	entries, err := os.ReadDir(m.path("calls"))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), prefix) {
			continue
		}
		calls, err := m.callsIn(e.Name())
		if err != nil {
			return nil, err
		}
		for name, n := range calls {
			total[name] += n
		}
	}
	return total, nil
}

// callsIn reads what lib/state.c maps: an array of {name[56], count}.
func (m *Machine) callsIn(file string) (map[string]uint64, error) {
	raw, err := os.ReadFile(m.path("calls", file))
	if err != nil {
		return nil, err
	}
	const nameSize, size = 56, 64
	calls := map[string]uint64{}
	for ; len(raw) >= size; raw = raw[size:] {
		name, _, _ := bytes.Cut(raw[:nameSize], []byte{0})
		if n := binary.NativeEndian.Uint64(raw[nameSize:size]); len(name) > 0 && n > 0 {
			calls[string(name)] = n
		}
	}
	return calls, nil
}
