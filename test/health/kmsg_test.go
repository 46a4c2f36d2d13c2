package health

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/kmsg"
)

// kernelLog is the log of testdata/node.kmsg, with the PCI addresses of the machine's GPUs where it says @N.
func (m *rig) kernelLog() string {
	m.t.Helper()
	text, err := os.ReadFile("testdata/node.kmsg")
	must(m.t, err)
	log := string(text)
	for slot, mark := range []string{"@0", "@1", "@2", "@3"} {
		pci, err := m.Get(slot, "pci")
		must(m.t, err)
		log = strings.ReplaceAll(log, mark, strings.TrimSuffix(pci, ".0"))
	}
	return log
}

// logged is a line as the agents report it.
func logged(l kmsg.Line) health.Observation {
	return health.Observation{PCI: l.PCI, Kind: health.XID, Code: l.XID, Detail: l.Text, FromKernelLog: true}
}

// told folds the XIDs of a log, as the agents do.
func (m *rig) told(log string) (lines []kmsg.Line) {
	for record := range strings.Lines(log) {
		if l, ok := kmsg.Parse(record); ok {
			lines = append(lines, l)
			m.observe(logged(l))
		}
	}
	return lines
}

// The kernel log has XIDs that NVML keeps to itself. Each counts once, whoever tells of it, and only against
// a GPU of this machine.
func TestCase31KernelLog(t *testing.T) {
	t.Run("what the log alone tells", func(t *testing.T) {
		m := well(t, "h100x8")
		if lines := m.told(m.kernelLog()); len(lines) != 5 {
			t.Errorf("%d XIDs", len(lines))
		}
		m.expect("as the table has it", map[int]health.State{0: health.GPULost, 1: health.Degraded, 2: health.Unhealthy})
		for slot, code := range map[int]uint64{0: 79, 1: 149, 2: 119} {
			h := m.health(slot)
			if h.Code != code || !strings.Contains(h.Detail, xid.XID(code).Meaning) {
				t.Errorf("GPU %d: %s", slot, h)
			}
		}
		if m.count(0, 154) != 1 || m.count(3, 48) != 0 {
			t.Errorf("XID 154: %d, XID 48: %d", m.count(0, 154), m.count(3, 48))
		}
	})
	t.Run("told twice", func(t *testing.T) {
		m := well(t, "h100x8")
		quiet := m.now
		m.step(10 * time.Second)
		m.xid(2, 119)
		m.step(2 * time.Second)
		m.told(m.kernelLog())
		if n := m.count(2, 119); n != 1 {
			t.Errorf("XID 119 was counted %d times", n)
		}
		if h := m.health(2); h.Detail != xid.XID(119).Meaning {
			t.Error(h)
		}
		if n := about(m.since(quiet), m.id(2)); n != 1 {
			t.Errorf("%d publications about GPU 2", n)
		}
	})
	t.Run("a boot before", func(t *testing.T) {
		// What an earlier agent knew of another boot is cleared by the reboot; the lines are there no more.
		m := well(t, "h100x8")
		m.told(m.kernelLog())
		m.reboot()
		m.look()
		m.step(10 * time.Second)
		m.expect("after a reboot", nil)
	})
	t.Run("followed", func(t *testing.T) {
		m := well(t, "h100x8")
		path := filepath.Join(t.TempDir(), "kmsg")
		must(t, os.WriteFile(path, []byte(m.kernelLog()), 0o644))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		var codes []uint64
		_ = kmsg.Follow(ctx, path, 1004, func(l kmsg.Line) { // its error is the end of ctx
			codes = append(codes, l.XID)
			m.observe(logged(l))
			if len(codes) == 3 {
				cancel()
			}
		})
		m.expect("from a sequence number on", map[int]health.State{1: health.Degraded, 2: health.Unhealthy})
	})
}
