package doctor

import (
	"strings"
)

// decideDriver is about the driver's own answer, after everything that is visible without it.
func decideDriver(c *chain) []Finding {
	d := c.Driver.Driver
	f := c.Facts
	switch d.State {
	case "ready":
		return []Finding{{"driver", OK, "NVML", strings.TrimSuffix("driver "+d.Version+", CUDA "+d.CUDA, ", CUDA "), ""}}
	case "failed", "pending":
		found := d.Reason
		if line := f.kernelLine(aboutModule); line != "" {
			found += "; kernel log: " + line
		}
		remedy := "look for NVRM lines in dmesg; if the driver does not recover, drain the node and reboot it"
		if strings.Contains(d.Reason, "does not answer") {
			remedy = "the driver hangs: look for NVRM lines in dmesg; drain the node and reboot it"
		}
		return c.broken(Finding{"driver", Problem, "NVML", found, remedy})
	}
	return c.broken(Finding{"driver", Problem, "NVML", d.Reason, "library, module and nodes were found: look for NVRM lines in dmesg, and reboot"})
}
