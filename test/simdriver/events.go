package simdriver

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
)

// Event types of nvml.h that tests raise.
const (
	EventSingleBitECC          = 0x1
	EventDoubleBitECC          = 0x2
	EventXID                   = 0x8
	EventMIGConfigChange       = 0x100
	EventSingleBitECCStorm     = 0x200
	EventDRAMRetirement        = 0x400
	EventDRAMRetirementFailure = 0x800
	EventNonFatalPoison        = 0x1000
	EventFatalPoison           = 0x2000
	EventGPUUnavailable        = 0x4000
	EventRecoveryAction        = 0x8000
)

const (
	systemUnbind = 0x1
	systemBind   = 0x2
)

// At attributes an event to a GPU instance and a compute instance; without it
// both are 0xFFFFFFFF, as from a driver that does not report them.
type At struct{ GI, CI int }

// WholeInstance, as At.CI, is an event of a GPU instance without a compute instance.
const WholeInstance = -1

// XID raises a critical error on a GPU. Only event sets registered before get it.
func (m *Machine) XID(slot int, code uint64, at ...At) error {
	return m.Event(slot, EventXID, code, at...)
}

// Storm raises the same critical error n times at once.
func (m *Machine) Storm(slot int, code uint64, n int, at ...At) error {
	line, err := m.eventLine(slot, EventXID, code, at...)
	if err != nil {
		return err
	}
	return m.appendEvent(slices.Repeat([]string{line}, n)...)
}

// Event raises one event of any type.
func (m *Machine) Event(slot int, eventType uint64, data uint64, at ...At) error {
	line, err := m.eventLine(slot, eventType, data, at...)
	if err != nil {
		return err
	}
	return m.appendEvent(line)
}

func (m *Machine) eventLine(slot int, eventType uint64, data uint64, at ...At) (string, error) {
	id := m.UUID(slot)
	if id == "" {
		return "", fmt.Errorf("raise event: no GPU in slot %d", slot)
	}
	gi, ci := "-", "-"
	if len(at) > 0 {
		gi = fmt.Sprint(at[0].GI)
		if at[0].CI != WholeInstance {
			ci = fmt.Sprint(at[0].CI)
		}
	}
	return fmt.Sprintf("%s %#x %d %s %s", id, eventType, data, gi, ci), nil
}

// appendEvent adds lines with the next sequence numbers, in one write.
func (m *Machine) appendEvent(lines ...string) error {
	return m.locked(func() error {
		text, err := os.ReadFile(m.path("events"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := os.OpenFile(m.path("events"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o666)
		if err != nil {
			return err
		}
		next := bytes.Count(text, []byte("\n"))
		var b bytes.Buffer
		for i, line := range lines {
			fmt.Fprintf(&b, "%d %s\n", next+i+1, line)
		}
		_, err = f.Write(b.Bytes())
		return errors.Join(err, f.Close())
	})
}
