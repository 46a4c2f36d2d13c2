package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// PCIAddress is the address of a PCI function as in /sys/bus/pci/devices: "0000:3b:00.0".
type PCIAddress string

// ParsePCIAddress parses a PCI address as NVML, sysfs or an operator writes it ("00000000:3B:00.0" with trailing
// NULs, "0000:3b:00.0", "3b:00.0") and returns the sysfs form. The domain has at most 32 bits. A domain above
// 0xffff keeps all of its digits, as sysfs has it for VMD domains ("10000:e1:00.0").
func ParsePCIAddress(s string) (PCIAddress, error) {
	s = strings.TrimRight(s, "\x00")
	parts := strings.Split(s, ":")
	if len(parts) == 2 {
		parts = append([]string{"0"}, parts...)
	}
	fail := func() (PCIAddress, error) {
		return "", fmt.Errorf("PCI address %q: want domain:bus:device.function in hex, such as 0000:3b:00.0", s)
	}
	if len(parts) != 3 {
		return fail()
	}
	slot, function, ok := strings.Cut(parts[2], ".")
	if !ok {
		return fail()
	}
	var n [4]uint64
	for i, f := range []struct {
		text string
		max  uint64
	}{{parts[0], 1<<32 - 1}, {parts[1], 0xff}, {slot, 0x1f}, {function, 7}} {
		v, err := strconv.ParseUint(f.text, 16, 64)
		if err != nil || v > f.max {
			return fail()
		}
		n[i] = v
	}
	return PCIAddress(fmt.Sprintf("%04x:%02x:%02x.%x", n[0], n[1], n[2], n[3])), nil
}
