package nodelabels

import "strings"

// PCI configuration space of a function (PCI Local Bus Specification 3.0, 6.1 and 6.7), and the capability by which NVIDIA's vGPU marks
// its devices. The kernel lets a process without CAP_SYS_ADMIN read the first 64 bytes of it only.
const (
	configSize       = 256
	statusByte       = 0x06
	statusHasList    = 0x10
	capabilityList   = 0x34
	vendorSpecific   = 0x09
	versionRecord    = 0  // of the vGPU capability: the driver on the host
	versionLength    = 10 // of the version, and of the branch after it
	capabilityHeader = 5  // ID, next, length, "VF"
)

// vgpuRecord returns the vGPU capability in a configuration space, and whether there is one.
func vgpuRecord(config []byte) ([]byte, bool) {
	if config[statusByte]&statusHasList == 0 {
		return nil, false
	}
	seen := map[byte]bool{}
	for at := config[capabilityList]; at != 0 && !seen[at] && int(at)+2 < configSize && config[at] != 0xff; at = config[at+1] {
		seen[at] = true
		if config[at] != vendorSpecific {
			continue
		}
		record := config[at:min(int(at)+int(config[at+2]), configSize)]
		return record, len(record) >= capabilityHeader && record[3] == 'V' && record[4] == 'F'
	}
	return nil, false
}

// hostDriver returns version and branch of the driver on the host: "460.16", "r460_00". Both are "" if the capability has none.
func hostDriver(record []byte) (version, branch string) {
	for at := capabilityHeader; at+1 < len(record); {
		kind, length := record[at], int(record[at+1])
		if kind != versionRecord {
			if length == 0 {
				return "", ""
			}
			at += length
			continue
		}
		if at += 2; at+2*versionLength > len(record) {
			return "", ""
		}
		trim := func(b []byte) string { return strings.Trim(string(b), "\x00") }
		return trim(record[at : at+versionLength]), trim(record[at+versionLength : at+2*versionLength])
	}
	return "", ""
}
