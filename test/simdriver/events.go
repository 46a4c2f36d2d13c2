package simdriver

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
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
// both are 0xFFFFFFFF, as from a driver that cannot tell.
type At struct{ GI, CI int }

// WholeInstance, as At.CI, is an event of a GPU instance without a compute instance.
const WholeInstance = -1

// XID raises a critical error on a GPU. Only event sets registered before hear of it.
func (m *Machine) XID(slot int, code uint64, at ...At) error {
	return m.Event(slot, EventXID, code, at...)
}

// Event raises one event of any type.
func (m *Machine) Event(slot int, eventType uint64, data uint64, at ...At) error {
	id := m.UUID(slot)
	if id == "" {
		return fmt.Errorf("raise event: no GPU in slot %d", slot)
	}
	gi, ci := "-", "-"
	if len(at) > 0 {
		gi = fmt.Sprint(at[0].GI)
		if at[0].CI != WholeInstance {
			ci = fmt.Sprint(at[0].CI)
		}
	}
	return m.appendEvent(fmt.Sprintf("%s %#x %d %s %s", id, eventType, data, gi, ci))
}

// appendEvent adds one line with the next sequence number, in one write.
func (m *Machine) appendEvent(line string) error {
	return m.locked(func() error {
		text, err := os.ReadFile(m.path("events"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := os.OpenFile(m.path("events"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o666)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(f, "%d %s\n", bytes.Count(text, []byte("\n"))+1, line)
		return errors.Join(err, f.Close())
	})
}
