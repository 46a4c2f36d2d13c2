// Package kmsg reads the XIDs that NVIDIA's driver writes to the kernel log. NVML does not report all of them: 79, 119, 120 and
// 62 are known to be missing among its events.
package kmsg

import (
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Line is one XID in the kernel log.
type Line struct {
	PCI  gpu.PCIAddress // function 0 of the GPU; the log does not name the function
	XID  uint64         // fits 32 bits
	Text string         // the driver's text after the number: one line of printable ASCII, may be empty
	Seq  uint64         // the record's sequence number; counts from 0 at boot
	Next uint64         // the sequence number to continue at: all lines before it were emitted; 0 = unknown
	Age  health.Age     // how long ago it was logged when it was emitted or returned

	Repeats int // lines of the same fault that Follow has left out
}

// Observation is the line as an observation of a GPU, without the process that the driver names: orchestrators must not store
// the names of users' processes.
func (l Line) Observation() health.Observation {
	return health.Observation{
		PCI: l.PCI, Kind: health.XID, Code: l.XID, Detail: withoutProcess(l.Text),
		FromKernelLog: true, NextSequence: l.Next, Age: l.Age, Repeats: l.Repeats,
	}
}

// fault is what repeated lines have in common.
type fault struct {
	pci  gpu.PCIAddress
	xid  uint64
	text string // what the driver says of it; "" for most XIDs, whose number is all that counts
}

// fault returns the fault of a line. For the faults of NVLink 5 that is the text up to the first number of the fault,
// and for a changed recovery action all of the text.
func (l Line) fault() fault {
	f := fault{pci: l.PCI, xid: l.XID}
	switch {
	case l.XID == xid.RecoveryActionChanged:
		f.text = l.Text
	case xid.HasSeverity(l.XID):
		f.text, _, _ = strings.Cut(l.Text, " 0x")
	}
	return f
}

// maxName is the longest name of a process in bytes (TASK_COMM_LEN without its final zero byte).
const maxName = 15

// withoutProcess removes "pid=30393, name=Media, " or "pid=2763, " from a text.
func withoutProcess(text string) string {
	before, rest, ok := strings.Cut(text, "pid=")
	if !ok || before != "" && !strings.HasSuffix(before, ", ") {
		return text
	}
	_, rest, _ = strings.Cut(rest, ", ")
	if name, ok := strings.CutPrefix(rest, "name="); ok {
		rest = afterName(name)
	}
	return strings.TrimSuffix(before+rest, ", ")
}

// afterName returns what follows the name of a process and ", ". A name may have ", " too, so it ends at the last one
// that a name of the longest length allows. If that one is in the driver's own text, the words before it are lost.
// The result is empty if no ", " is there: nothing shows where the name ends.
func afterName(text string) string {
	if strings.HasSuffix(text, ",") {
		text += " " // the driver had no text, and the space was trimmed
	}
	end := min(longestName(text)+len(", "), len(text))
	last := strings.LastIndex(text[:end], ", ")
	if last < 0 {
		return ""
	}
	return text[last+len(", "):]
}

// longestName returns how many bytes of a text, which begins with the name of a process, that name has at most. The
// kernel writes some bytes as \xNN.
func longestName(text string) (end int) {
	for n := 0; n < maxName && end < len(text); n++ {
		if strings.HasPrefix(text[end:], `\x`) {
			end += len(escapedNewline)
		} else {
			end++
		}
	}
	return min(end, len(text))
}

// firstLine returns the first line of a message. A newline in the name of a process does not end it, because the
// driver's text follows.
func firstLine(message string) string {
	head, rest, ok := strings.Cut(message, ", name=")
	if !ok || strings.Contains(head, escapedNewline) {
		line, _, _ := strings.Cut(message, escapedNewline)
		return line
	}
	end := longestName(rest)
	line, _, _ := strings.Cut(rest[end:], escapedNewline)
	return head + ", name=" + rest[:end] + line
}

// Parse parses one record of /dev/kmsg ("priority,sequence,timestamp,flags;message", then lines that describe the device;
// kernel: Documentation/ABI/testing/dev-kmsg). It reports false if the record is not an XID of the driver, or not in that form.
//
// The driver writes "NVRM: Xid (PCI:domain:bus:device): number, text" (kernel_rc.c, krcReportXid; old releases without "PCI:").
// For an XID of a MIG instance the parentheses also contain "GPU-I:05" or "GPU-I:05 GPU-CI:00". Parse puts that in front of
// Text and does not attribute the XID to an instance: the numbers are decimal, but no public source states that they are the
// instance IDs of NVML.
func Parse(record string) (Line, bool) {
	head, message, ok := parseRecord(record)
	if !ok {
		return Line{}, false
	}
	return parseLine(head, message)
}

const (
	// maxKernelPriority is the highest of the kernel's facility 0, which no process can use for its own messages.
	maxKernelPriority = 7

	// escapedNewline is a newline in a record of /dev/kmsg.
	escapedNewline = `\x0a`
)

// isLoad reports whether a record is about the load of the driver (nv.c, nvidia_init_module):
//
//	NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.183.01
func isLoad(head header, message string) bool {
	return head.priority <= maxKernelPriority && strings.HasPrefix(message, "NVRM: loading NVIDIA UNIX ")
}

// parseLine is Parse for a record that was split.
func parseLine(head header, message string) (Line, bool) {
	line, ok := parseMessage(escape(message, unprintable))
	if !ok || head.priority > maxKernelPriority {
		return Line{}, false
	}
	line.Seq = head.seq
	return line, true
}

// header is the part of a record before the message.
type header struct {
	priority uint64
	seq      uint64
	at       time.Duration // since boot, by the clock of the log, which no time server corrects; 0 = unknown
}

// parseRecord splits a record. It reports false for any other line, such as one that describes the device.
func parseRecord(record string) (h header, message string, ok bool) {
	record, _, _ = strings.Cut(record, "\n")
	head, message, _ := strings.Cut(record, ";")
	priority, rest, _ := strings.Cut(head, ",")
	seq, rest, ok := strings.Cut(rest, ",")
	if !ok {
		return h, "", false
	}
	at, _, _ := strings.Cut(rest, ",")
	var err error
	if h.priority, err = strconv.ParseUint(priority, 10, 32); err != nil {
		return h, "", false
	}
	if h.seq, err = strconv.ParseUint(seq, 10, 64); err != nil || h.seq == math.MaxUint64 {
		return h, "", false // no log reaches this, and it has no successor
	}
	if micros, err := strconv.ParseInt(at, 10, 64); err == nil && micros > 0 && micros <= math.MaxInt64/1000 {
		h.at = time.Duration(micros) * time.Microsecond
	}
	return h, message, true
}

func parseMessage(message string) (Line, bool) {
	rest, ok := strings.CutPrefix(firstLine(message), "NVRM: Xid (")
	if !ok {
		return Line{}, false
	}
	where, rest, ok := strings.Cut(rest, "): ")
	if !ok {
		return Line{}, false
	}
	address, instance, _ := strings.Cut(strings.TrimPrefix(where, "PCI:"), " ")
	if !strings.Contains(address, ".") {
		address += ".0"
	}
	pci, err := gpu.ParsePCIAddress(address)
	if err != nil {
		return Line{}, false
	}
	number, text, _ := strings.Cut(rest, ",")
	code, err := strconv.ParseUint(number, 10, 32)
	if err != nil {
		return Line{}, false
	}
	text = strings.TrimSpace(text)
	if instance = strings.TrimSpace(instance); instance != "" {
		text = strings.TrimSuffix(instance+", "+text, ", ")
	}
	return Line{PCI: pci, XID: code, Text: text}, true
}
