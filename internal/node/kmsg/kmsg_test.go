package kmsg_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
)

// The messages are from reports of users and from NVIDIA's source and documents.
func TestParse(t *testing.T) {
	for name, c := range map[string]struct {
		record string
		want   kmsg.Line // zero: not an XID
	}{
		"fallen off the bus": {
			"4,2002,301234570,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.\n",
			kmsg.Line{PCI: "0000:01:00.0", XID: 79, Text: "GPU has fallen off the bus.", Seq: 2002}},
		"with a process": {
			"3,7,1,-;NVRM: Xid (PCI:0000:01:00): 79, pid=30393, name=Media, GPU has fallen off the bus.",
			kmsg.Line{PCI: "0000:01:00.0", XID: 79, Text: "pid=30393, name=Media, GPU has fallen off the bus.", Seq: 7}},
		"process unknown": {
			"4,0,9,-;NVRM: Xid (PCI:0000:00:08): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No",
			kmsg.Line{PCI: "0000:00:08.0", XID: 94, Text: "pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No"}},
		"a colon and brackets in the name": {
			"4,1,9,-;NVRM: Xid (PCI:0002:00:00): 119, pid=1582259, name=nvc:[driver], Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8).",
			kmsg.Line{PCI: "0002:00:00.0", XID: 119, Seq: 1, Text: "pid=1582259, name=nvc:[driver], Timeout after 6s of waiting for RPC response from GPU1 GSP! Expected function 76 (GSP_RM_CONTROL) (0x20802a02 0x8)."}},
		"GSP exception": {
			"4,1,9,-;NVRM: Xid (PCI:000f:01:00): 120, pid=9111, name=python, GSP task exception: load access fault",
			kmsg.Line{PCI: "000f:01:00.0", XID: 120, Seq: 1, Text: "pid=9111, name=python, GSP task exception: load access fault"}},
		"PMU halt": {
			"4,1,9,-;NVRM: Xid (PCI:0000:01:00): 62, pid=2763, 0c83(1870) 00000000 00000000",
			kmsg.Line{PCI: "0000:01:00.0", XID: 62, Seq: 1, Text: "pid=2763, 0c83(1870) 00000000 00000000"}},
		"recovery action, kernel with PRINTK_CALLER": {
			"4,1,9,-,caller=T220;NVRM: Xid (PCI:0000:97:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
			kmsg.Line{PCI: "0000:97:00.0", XID: 154, Seq: 1, Text: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"}},
		"NVLink 5": {
			"4,1,9,-;NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
			kmsg.Line{PCI: "0000:00:00.0", XID: 149, Seq: 1, Text: "NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6 0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)"}},
		"row remapper, a high slot": {
			"4,1,9,-;NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
			kmsg.Line{PCI: "0000:10:1c.0", XID: 63, Seq: 1, Text: "pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."}},
		"symptom": {
			"4,1,9,-;NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
			kmsg.Line{PCI: "0000:dc:00.0", XID: 45, Seq: 1, Text: "pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149"}},
		"GPU instance": {
			"4,1,9,-;NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
			kmsg.Line{PCI: "0000:01:00.0", XID: 94, Seq: 1, Text: "GPU-I:05, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No"}},
		"compute instance": {
			"4,1,9,-;NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 13",
			kmsg.Line{PCI: "0000:3b:00.0", XID: 13, Seq: 1, Text: "GPU-I:01 GPU-CI:02"}},
		"old driver": {
			"4,1,9,-;NVRM: Xid (0000:03:00): 14, Channel 00000001",
			kmsg.Line{PCI: "0000:03:00.0", XID: 14, Seq: 1, Text: "Channel 00000001"}},
		"with function, wide domain": {
			"4,1,9,-;NVRM: Xid (PCI:10000:e1:00.0): 48, DBE",
			kmsg.Line{PCI: "10000:e1:00.0", XID: 48, Seq: 1, Text: "DBE"}},
		"nothing but the number": {
			"4,1,9,-;NVRM: Xid (PCI:0000:00:1e.0): 48",
			kmsg.Line{PCI: "0000:00:1e.0", XID: 48, Seq: 1}},
		"two lines in one message": {
			`4,1,9,-;NVRM: Xid (PCI:0000:01:00): 16, \x0aHead 00000000 Count 00006e2e`,
			kmsg.Line{PCI: "0000:01:00.0", XID: 16, Seq: 1}},
		"a newline in the name": {
			`4,1,9,-;NVRM: Xid (PCI:0000:01:00): 45, pid=7, name=a\x0a\x0ab, Ch 00000001\x0aand more`,
			kmsg.Line{PCI: "0000:01:00.0", XID: 45, Seq: 1, Text: `pid=7, name=a\x0a\x0ab, Ch 00000001`}},
		"a name after the first line": {
			`4,1,9,-;NVRM: Xid (PCI:0000:01:00): 16\x0aHead 00000000, name=x, secret`,
			kmsg.Line{PCI: "0000:01:00.0", XID: 16, Seq: 1}},
		"a device's record": {
			"4,1,9,-;NVRM: Xid (PCI:0000:01:00): 48, DBE\n SUBSYSTEM=pci\n DEVICE=+pci:0000:01:00.0\n",
			kmsg.Line{PCI: "0000:01:00.0", XID: 48, Seq: 1, Text: "DBE"}},
		"an escape stays": {
			`4,1,9,-;NVRM: Xid (PCI:0000:01:00): 31, pid=7, name=\xc3\xa4\x5cx0a, MMU Fault`,
			kmsg.Line{PCI: "0000:01:00.0", XID: 31, Seq: 1, Text: `pid=7, name=\xc3\xa4\x5cx0a, MMU Fault`}},
		"bytes that the kernel escapes, in a file": {
			"4,1,9,-;NVRM: Xid (PCI:0000:01:00): 79, pid=7, name=\xc3\xa4\\\r, x",
			kmsg.Line{PCI: "0000:01:00.0", XID: 79, Seq: 1, Text: `pid=7, name=\xc3\xa4\\x0d, x`}},

		"empty":                {record: ""},
		"no header":            {record: "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."},
		"no message":           {record: "4,1,9,-"},
		"short header":         {record: "4,1;NVRM: Xid (PCI:0000:01:00): 79, x"},
		"bad priority":         {record: "x,1,9,-;NVRM: Xid (PCI:0000:01:00): 79, x"},
		"bad sequence":         {record: "4,-1,9,-;NVRM: Xid (PCI:0000:01:00): 79, x"},
		"a process wrote it":   {record: "12,1,9,-;NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus."},
		"continuation":         {record: " DEVICE=+pci:0000:01:00.0"},
		"not at the start":     {record: "4,1,9,-;foo: NVRM: Xid (PCI:0000:01:00): 79, x"},
		"NVSwitch":             {record: "4,1,9,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28002, Non-fatal, Link 46 CC_ERR"},
		"another line of NVRM": {record: "4,1,9,-;NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."},
		"no address":           {record: "4,1,9,-;NVRM: Xid (): 79, x"},
		"bad address":          {record: "4,1,9,-;NVRM: Xid (PCI:0001:ab:cd): 69, x"},
		"no number":            {record: "4,1,9,-;NVRM: Xid (PCI:0000:01:00): pid=1"},
		"negative":             {record: "4,1,9,-;NVRM: Xid (PCI:0000:01:00): -1, x"},
		"cut":                  {record: "4,1,9,-;NVRM: Xid (PCI:0000:01:00)"},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := kmsg.Parse(c.record)
			if ok != (c.want != kmsg.Line{}) {
				t.Fatalf("an XID: %v", ok)
			}
			if !ok {
				return
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// An observation has the fault, but not the process.
func TestObservation(t *testing.T) {
	for text, want := range map[string]string{
		"":                                   "",
		"GPU has fallen off the bus.":        "GPU has fallen off the bus.",
		"pid=30393, name=Media, GPU is gone": "GPU is gone",
		"pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No, D-RST: No": "Contained: SM (0x1). RST: No, D-RST: No",
		"pid=2763, 0c83(1870) 00000000":                                            "0c83(1870) 00000000",
		"pid=1582259, name=nvc:[driver], Timeout":                                  "Timeout",
		"GPU-I:05, pid=7194, Contained: CE":                                        "GPU-I:05, Contained: CE",
		"GPU-I:05, pid=7194, name=a":                                               "GPU-I:05",
		"pid=7":                                                                    "",
		"caused by pid=7, name=a, and so on":                                       "caused by pid=7, name=a, and so on",

		// A name of up to 15 bytes may have commas, and text that looks like the driver's.
		"pid=7, name=a, secret, Timeout":                               "Timeout",
		"pid=7, name=x, Ch 1, secret, Ch 00000003, intr 00000000.":     "Ch 00000003, intr 00000000.",
		"pid=7, name=123456789, abcd, GPU has fallen off the bus.":     "GPU has fallen off the bus.",
		"pid=7, name=123456789abcd, , GPU has fallen off the bus.":     "GPU has fallen off the bus.",
		`pid=7, name=\xc3\xa4\xc3\xa4, \xc3\xa4secret, GPU has fallen`: "GPU has fallen",
		"pid=7, name=, , secret, Timeout after 6s, and so on":          "Timeout after 6s, and so on",
		"pid=7, name=x, secret,":                                       "",
		"pid=7, name=name=x, pid=8, Timeout":                           "Timeout",
		"GPU-I:05, pid=7194, name=x, secret, Contained: CE":            "GPU-I:05, Contained: CE",
		"pid=7, name=a name that is longer than any, Timeout":          "",

		// What can't be told from the name is lost.
		"pid=7, name=sh, Ch 00000003, intr 00000000.":      "intr 00000000.",
		"pid=7, name=python3, Ch 00000003, intr 00000000.": "Ch 00000003, intr 00000000.",
	} {
		got := kmsg.Line{PCI: "0000:01:00.0", XID: 79, Text: text, Seq: 7}.Observation()
		if diff := cmp.Diff(health.Observation{PCI: "0000:01:00.0", Kind: health.XID, Code: 79, Detail: want, FromKernelLog: true}, got); diff != "" {
			t.Errorf("%q: %s", text, diff)
		}
	}
}

// Whatever the name of a process is, an observation has the driver's text or its end, and nothing of the name.
func TestNameNeverLeaks(t *testing.T) {
	const text = "Ch 00000001, errorString CTX_SWITCH_TIMEOUT, Info 0x3c046"
	random := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		name := make([]byte, random.IntN(16))
		for i := range name {
			name[i] = ", =xpid\\\n\xc3"[random.IntN(10)]
		}
		var escaped strings.Builder
		for _, b := range name {
			if b < ' ' || b > '~' || b == '\\' {
				fmt.Fprintf(&escaped, `\x%02x`, b)
			} else {
				escaped.WriteByte(b)
			}
		}
		record := "4,1,9,-;NVRM: Xid (PCI:0000:01:00): 109, pid=7, name=" + escaped.String() + ", " + text
		line, ok := kmsg.Parse(record)
		if got := line.Observation().Detail; !ok || got == "" || !strings.HasSuffix(text, got) {
			t.Fatalf("%q: %q", record, got)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("4,2002,301234570,-;NVRM: Xid (PCI:0000:01:00): 79, pid=30393, name=Media, GPU has fallen off the bus.\n DEVICE=+pci:0000:01:00.0\n")
	f.Add("4,1,9,-,caller=T2;NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, Contained")
	f.Add(`0,18446744073709551615,9,c;NVRM: Xid (10000:e1:1f.7): 4294967295\x0a`)
	f.Add("0,0,;NVRM: Xid (0:0  ): 0")
	f.Fuzz(func(t *testing.T, record string) {
		line, ok := kmsg.Parse(record)
		if !ok {
			return
		}
		if again, err := gpu.ParsePCIAddress(string(line.PCI)); err != nil || again != line.PCI {
			t.Errorf("PCI %q reads as %q, %v", line.PCI, again, err)
		}
		if line.XID >= 1<<32 {
			t.Errorf("XID %d", line.XID)
		}
		if line.Text != strings.TrimSpace(line.Text) || strings.ContainsFunc(line.Text, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("text %q", line.Text)
		}
		if len(line.Text) >= 4*len(record) { // each byte escaped
			t.Errorf("%d bytes of text from a record of %d", len(line.Text), len(record))
		}
	})
}
