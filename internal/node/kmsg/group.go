package kmsg

import "strings"

const (
	// driverPrefix begins each record of NVIDIA's driver.
	driverPrefix = "NVRM: "

	// mismatchPrefix begins the record of the driver that has a long text of a process: the version that a client
	// claims to have, of 63 bytes (osapi.c, rm_perform_version_check).
	mismatchPrefix = driverPrefix + "API mismatch"
)

// group is a sequence of lines of syslog(2) with one head: time, priority and caller. It has one or more records.
//
// The kernel writes the head of a record before each of its lines. The text of a process can be in a record, with its
// newlines: mount(2) logs an option that the file system does not have.
//
//	<3>[27438.640864] tmpfs: Unknown parameter 'x
//	<3>[27438.640864] NVRM: Xid (PCI:0000:1b:00): 79'
//
// So a line with the head of the one before may be of the same record, and does not count. After a line of the driver
// it is a record: several GPUs can have a fault in the same microsecond. The driver logs the name of a process, which
// is too short for an XID, but can have newlines.
//
//	<4>[27438.640864] NVRM: Xid (PCI:0000:1b:00): 119, pid=7, name=a
//	<4>[27438.640864] b, Timeout after 6s of waiting
//	<4>[27438.640864] NVRM: Xid (PCI:0000:2b:00): 119, pid=7, name=a
type group struct {
	head string
	open bool // a line of the driver is a record
	name int  // how many bytes of the name of a process may follow the latest line
}

// begins adds a line to the group, or begins another group, and reports whether the line begins a record.
func (g *group) begins(head, message string) bool {
	driver := strings.HasPrefix(message, driverPrefix)
	switch {
	case head != g.head:
		g.head = head
	case !g.open:
		return false
	case !driver: // the rest of a name, or a record of another module, which may be followed by text of a process
		g.open = g.name > 0
		g.name = max(0, g.name-len("\n")-len(message))
		return false
	}
	g.open = driver && !strings.HasPrefix(message, mismatchPrefix)
	g.name = restOfName(message)
	return true
}

// restOfName returns how many bytes of a process's name may be missing in a line of the driver, which ends with a part
// of one.
func restOfName(message string) int {
	i := strings.LastIndex(message, "name=")
	if i < 0 {
		return 0
	}
	return max(0, maxName-len(message[i+len("name="):]))
}
