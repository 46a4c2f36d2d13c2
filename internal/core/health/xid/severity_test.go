package xid_test

import (
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Rows of NVIDIA's table for XIDs 144 to 150, and lines of public logs.
func TestSeverityOf(t *testing.T) {
	line := func(unit, severity string, interrupt, status uint32) string {
		return fmt.Sprintf("%s %s XC0 i0 Link 03 (0x%08x 0x%08x 0x00000000 0x00000000)", unit, severity, interrupt, status)
	}
	for _, c := range []struct {
		name string
		code uint64
		text string
		want xid.Severity
	}{
		{"bit errors", 149, line("NETIR_BER_EVENT", "Nonfatal", 0x86226, 1), xid.Nonfatal},
		{"a corrected error", 144, line("SAW_MVB", "Nonfatal", 0x21, 4), xid.Nonfatal},
		{"an uncorrected one", 144, line("SAW_MVB", "Fatal", 0x21, 2), xid.Fatal},
		{"an application's", 145, line("RLW_SRC_TRACK", "Nonfatal", 0x7, 8), xid.Nonfatal},
		{"no debug data", 145, "RLW_SRC_TRACK Fatal XC0 i1 Link 00 (0x00000001 0x00000002)", xid.Fatal},
		{"one word", 150, "MSE_WATCHDOG Fatal XC0 i0 Link -1 (0x00000000)", xid.Fatal},
		{"a unit of a later driver", 148, line("NVLPW_NEW", "Nonfatal", 0xf, 1<<31), xid.Nonfatal},

		{"RXPIPE of R570", 145, line("RLW_RXPIPE", "Nonfatal", 0x0409a0c2, 8), xid.Nonfatal},
		{"RXPIPE of R570, promoted", 145, line("RLW_RXPIPE", "Nonfatal", 0x0409a4c2, 1), xid.Fatal},
		{"RXPIPE of R575", 145, line("RLW_RXPIPE", "Nonfatal", 0x06, 1), xid.Nonfatal},
		{"RXPIPE of R575, promoted", 145, line("RLW_RXPIPE", "Nonfatal", 0x86, 1), xid.Fatal},
		{"these bits of another unit", 145, line("RLW_REMAP", "Nonfatal", 0x84, 1), xid.Nonfatal},

		{"link event", 149, line("NETIR_LINK_EVT", "Fatal", 0x004505c6, 0), xid.Fatal},
		{"link down", 149, line("NETIR_LINK_DOWN", "Fatal", 0x00000011, 0), xid.Fatal},
		{"link event by software", 149, line("NETIR_LINK_EVT", "Fatal", 0x026001c6, 0), xid.LinkTakenDown},
		{"link down by the host", 149, line("NETIR_LINK_DOWN", "Fatal", 0x02800011, 0), xid.LinkTakenDown},
		{"these bits of another unit", 149, line("NETIR_INT", "Fatal", 0x02800018, 0), xid.Fatal},

		{"another XID", 143, line("SAW_MVB", "Fatal", 0x21, 2), ""},
		{"another XID", 151, line("SAW_MVB", "Fatal", 0x21, 2), ""},
		{"empty", 149, "", ""},
		{"another severity", 149, line("NETIR_INT", "Corrected", 0x18, 0), ""},
		{"lower case", 149, line("NETIR_INT", "fatal", 0x18, 0), ""},
		{"cut", 149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 03", ""},
		{"no number", 149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0xgg 0x1)", ""},
		{"too large", 149, "NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x100000000 0x1)", ""},
		{"the severity elsewhere", 149, "Nonfatal NETIR_BER_EVENT XC0 i0 Link 03 (0x00086226 0x00000001)", ""},
	} {
		if got := xid.SeverityOf(c.code, c.text); got != c.want {
			t.Errorf("%s: %d %q is %q, want %q", c.name, c.code, c.text, got, c.want)
		}
	}
}

// An unknown severity may be fatal, so it is worse than one that is known not to be.
func TestWorse(t *testing.T) {
	order := []xid.Severity{xid.Nonfatal, xid.LinkTakenDown, "", xid.Fatal}
	for i, low := range order {
		for _, high := range order[i:] {
			if low.Worse(high) != high || high.Worse(low) != high {
				t.Errorf("%q and %q: %q, %q", low, high, low.Worse(high), high.Worse(low))
			}
		}
	}
}

// A severity changes no other XID, and an unknown one changes none.
func TestNamed(t *testing.T) {
	for code := range uint64(200) {
		if xid.Named(code, "") != xid.XID(code) || xid.Named(code, "of a later version") != xid.XID(code) {
			t.Errorf("XID %d differs without a severity", code)
		}
		if !xid.HasSeverity(code) && xid.Named(code, xid.Fatal) != xid.XID(code) {
			t.Errorf("XID %d has a severity", code)
		}
	}
}
