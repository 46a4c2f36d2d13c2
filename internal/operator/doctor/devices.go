package doctor

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// decideDevices is about single devices: on the bus and not listed, listed and not offered, offered and without work.
func decideDevices(c *chain) []Finding {
	f := c.Facts
	r := f.Driver
	if f.Agent.Running && f.Agent.Report.Driver.State == "ready" {
		r = f.Agent.Report
	}
	findings := append(missingGPUs(f), unreadable(f)...)
	findings = append(findings, excluded(r)...)
	findings = append(findings, withoutWork(f, r)...)
	findings = append(findings, degraded(r)...)
	findings = append(findings, missingCapabilities(r)...)
	offered := "offered: " + report.Noun(len(r.Devices), "device") + " of pool " + pools(r)
	if len(r.Devices) == 0 {
		offered = "offered: no device"
		if Problems(findings) == 0 && (len(r.Excluded) > 0 || len(f.Driver.Devices) == 0) { // else the agent and the driver disagree: decideAgent
			findings = append(findings, nothingOffered(f, r))
		}
	}
	if Problems(findings) == 0 {
		findings = append(findings, Finding{"devices", OK, "NVML, policy", offered, ""})
	}
	return findings
}

// pools are the names of the pools with devices.
func pools(r report.Report) string {
	var names []string
	for _, d := range r.Devices {
		if !slices.Contains(names, d.Pool) {
			names = append(names, d.Pool)
		}
	}
	return list(names)
}

// nothingOffered is the finding for a driver that works, while nothing is offered.
func nothingOffered(f *Facts, r report.Report) Finding {
	if len(r.Excluded) > 0 {
		return Finding{"devices", Problem, "policy, configuration", "every device is excluded: " + r.Excluded[0].Reason,
			"change the rule or setting: " + f.Program + " inspect lists the reason for each device"}
	}
	return Finding{"devices", Problem, "NVML", "the driver lists no GPU", "look for NVRM lines in dmesg (RmInitAdapter failed); check that the driver supports this GPU"}
}

// missingGPUs are the GPUs on the PCI bus that the driver does not list.
func missingGPUs(f *Facts) (findings []Finding) {
	if !f.PCI {
		return nil
	}
	var unidentified []report.Excluded // failed before the driver returned an address
	for _, e := range f.Driver.Excluded {
		if e.Failed && e.PCI == "" {
			unidentified = append(unidentified, e)
		}
	}
	missing := unlisted(f)
	for i, g := range missing {
		if i < len(unidentified) && len(missing) == len(unidentified) {
			findings = append(findings, failed(f, g.Address, unidentified[i]))
			continue
		}
		findings = append(findings, missingGPU(f, g))
	}
	return findings
}

// lostRemedy is for a GPU that does not answer on the PCI bus. It begins with the action in the agent's health of one.
const lostRemedy = "drain the node and reboot it; if the GPU is still lost, check slot and power; if it happens again, replace the card"

func missingGPU(f *Facts, g pciGPU) Finding {
	place := f.sys("bus/pci/devices/" + g.Address)
	name := "GPU " + g.Address
	line := f.kernelLineOf(g.Address)
	known, ok := f.Known[g.Address]
	switch {
	case g.Off:
		return Finding{"devices", Problem, place + "/config", name + " has fallen off the bus: its configuration space reads ff" + line,
			lostRemedy}
	case g.Driver == "vfio-pci":
		return Finding{"devices", Note, place + "/driver", name + " is bound to vfio-pci, for virtual machines",
			"if containers should use it: remove its id from vfio-pci.ids, and reboot"}
	case known.Excluded:
		return Finding{"devices", Warning, f.proc("driver/nvidia/gpus/" + g.Address), name + " is excluded by an option of the kernel module",
			"remove it from NVreg_ExcludedGpus in /etc/modprobe.d, and load the module again"}
	case g.Driver == "nouveau":
		return Finding{"devices", Problem, place + "/driver", name + " is bound to nouveau", "blacklist nouveau in /etc/modprobe.d, build the initramfs again, and reboot"}
	case ok:
		return Finding{"devices", Problem, f.proc("driver/nvidia/gpus/" + g.Address), name + " is known to the kernel module, and NVML does not list it: its initialisation failed" + line,
			"dmesg | grep -i 'NVRM.*" + strings.TrimSuffix(g.Address, ".0") + "'; reset or power-cycle it"}
	case g.Driver == "":
		return Finding{"devices", Problem, place + "/driver", name + " has no kernel driver" + line,
			"echo " + g.Address + " > /sys/bus/pci/drivers/nvidia/bind; if that fails: does this driver version, open or proprietary, support it?"}
	case g.Driver == "nvidia":
		return Finding{"devices", Problem, place + "/driver", name + " is bound to the module nvidia, and NVML does not list it" + line, "look for NVRM lines with this address in dmesg"}
	}
	return Finding{"devices", Problem, place + "/driver", name + " is bound to " + g.Driver, "unbind it, remove its id from the configuration of " + g.Driver + ", and bind it to nvidia"}
}

// kernelLineOf is the latest line of the kernel log about a PCI address, to be appended.
func (f *Facts) kernelLineOf(address string) string {
	for _, line := range slices.Backward(f.Kernel) {
		if strings.Contains(line, strings.TrimSuffix(address, ".0")) {
			return "; kernel log: " + line
		}
	}
	return ""
}

// failed is a GPU of which the driver's calls fail.
func failed(f *Facts, address string, e report.Excluded) Finding {
	name := "GPU " + strconv.Itoa(e.Index)
	if address != "" {
		name += " (" + address + ")"
	}
	remedy := "look for NVRM and Xid lines in dmesg; drain the node, and reset the GPU (nvidia-smi --gpu-reset -i " + strconv.Itoa(e.Index) + ") or reboot"
	if strings.Contains(e.Reason, "lost") {
		remedy = lostRemedy
	}
	return Finding{"devices", Problem, "NVML", name + " can't be read: " + e.Reason + f.kernelLineOf(cmp.Or(address, "-")), remedy}
}

// unreadable are the GPUs that the driver lists and whose calls fail, apart from those of missingGPUs.
func unreadable(f *Facts) (findings []Finding) {
	for _, e := range f.Driver.Excluded {
		if e.Failed && (e.PCI != "" || !f.PCI || len(unlisted(f)) == 0) {
			findings = append(findings, failed(f, string(e.PCI), e))
		}
	}
	return findings
}

// excluded are the devices that are not offered on purpose, or because they have no MIG instance.
func excluded(r report.Report) (findings []Finding) {
	byReason := map[string][]string{}
	var reasons []string
	for _, e := range r.Excluded {
		name := "GPU " + strconv.Itoa(e.Index)
		_, instance, _ := strings.Cut(e.ID, " ") // "GPU-... GI 1 CI 0"
		switch {
		case e.Failed:
			continue
		case strings.Contains(e.Reason, "no MIG instances"):
			findings = append(findings, Finding{"devices", Problem, "NVML", name + ": " + e.Reason,
				fmt.Sprintf("make instances: nvidia-smi mig -i %d -cgi PROFILE -C; or switch MIG off: nvidia-smi -i %[1]d -mig 0", e.Index)})
			continue
		}
		if len(byReason[e.Reason]) == 0 {
			reasons = append(reasons, e.Reason)
		}
		byReason[e.Reason] = append(byReason[e.Reason], strings.TrimSpace(name+" "+instance))
	}
	for _, reason := range reasons {
		findings = append(findings, Finding{"devices", Note, "policy, configuration", "not offered: " + list(byReason[reason]) + ": " + reason, ""})
	}
	return findings
}

// unlisted are the GPUs on the bus that the driver does not list, and whose failure has no address. A lost GPU is in the history only.
func unlisted(f *Facts) (missing []pciGPU) {
	for _, g := range f.GPUs {
		same := func(pci gpu.PCIAddress) bool { return string(pci) == g.Address }
		if !slices.ContainsFunc(f.Driver.Devices, func(d report.Device) bool { return same(d.PCI) && d.State != health.GPULost }) &&
			!slices.ContainsFunc(f.Driver.Excluded, func(e report.Excluded) bool { return same(e.PCI) }) {
			missing = append(missing, g)
		}
	}
	return missing
}

// withoutWork are the devices that are offered and take no work, by cause, apart from those of which the driver's calls fail here, too.
func withoutWork(f *Facts, r report.Report) (findings []Finding) {
	reported := func(d report.Device) bool {
		return slices.ContainsFunc(unlisted(f), func(g pciGPU) bool { return g.Address == string(d.PCI) }) ||
			slices.ContainsFunc(f.Driver.Excluded, func(e report.Excluded) bool { return e.Failed && (e.PCI == d.PCI || e.PCI == "" && e.Index == d.Index) })
	}
	type reason struct{ cause, action string }
	var order []reason
	names, first := map[reason][]string{}, map[reason]report.Device{}
	for _, d := range r.Devices {
		if d.Schedulable || reported(d) {
			continue
		}
		why := reason{d.Cause, d.Action}
		if d.Cause == "MPS_DAEMON_DOWN" {
			why.cause += " " + d.Pool
		}
		name := "GPU " + d.CurrentIndex()
		if len(names[why]) == 0 {
			order, first[why] = append(order, why), d
		}
		if !slices.Contains(names[why], name) {
			names[why] = append(names[why], name)
		}
	}
	for _, why := range order {
		d := first[why]
		one := Finding{"devices", Problem, "health", "no work for " + list(names[why]) + ": " + d.Health, cmp.Or(d.Action, "see docs/operations.md, Health")}
		if d.Action == "run doctor" {
			one.Remedy = "see the other findings"
		}
		if remedy := passing(r, d.Cause); remedy != "" {
			one.Severity, one.Remedy = Note, remedy
		}
		if d.Cause == "MPS_DAEMON_DOWN" {
			one.Place = "MPS control daemon of pool " + d.Pool
			one.Remedy = "start the MPS control daemon of the pool: mps-daemon runs one, see MPS in docs/sharing.md"
		}
		findings = append(findings, one)
	}
	return append(findings, besides(r, reported)...)
}

// passing is what to wait for with a cause that is of no fault and ends by itself; "" = it is of a fault.
func passing(r report.Report, cause string) string {
	switch cause {
	case "HELD": // the policy has changed
		return "wait for the workload, or end it: new work gets the device then"
	case health.ReasonProving.String():
		return "wait for the end of the proof"
	case health.ReasonResetting.String():
		return "wait for the end of the reset"
	case health.ReasonNoCDI.String(), health.ReasonOverlap.String():
		if r.Provisional {
			return justStarted
		}
	}
	return ""
}

// degraded are the devices that take work and need attention, by cause.
func degraded(r report.Report) (findings []Finding) {
	type reason struct{ cause, action string }
	var order []reason
	names, first := map[reason][]string{}, map[reason]report.Device{}
	for _, d := range r.Devices {
		why, name := reason{d.Cause, d.Action}, "GPU "+d.CurrentIndex()
		if d.State != health.Degraded || !d.Schedulable || slices.Contains(names[why], name) {
			continue
		}
		if len(names[why]) == 0 {
			order, first[why] = append(order, why), d
		}
		names[why] = append(names[why], name)
	}
	for _, why := range order {
		findings = append(findings, Finding{"devices", Warning, "health", list(names[why]) + ": " + first[why].Health, cmp.Or(why.action, "see docs/operations.md, Health")})
	}
	return findings
}

// besides are the conditions of devices without work that the worst one hides, with another remedy: what clears that one need not clear them.
func besides(r report.Report, reported func(report.Device) bool) (findings []Finding) {
	for _, c := range r.Conditions {
		hidden := func(d report.Device) bool {
			return d.GPU == c.GPU && d.Cause != c.Cause && d.Action != c.Action && !d.Schedulable && !reported(d)
		}
		if c.Action == "" || !c.InEffect() || !slices.ContainsFunc(r.Devices, hidden) {
			continue
		}
		findings = append(findings, Finding{"devices", Problem, "health", fmt.Sprintf("besides, %s is %s; cleared by: %s", c, c.State, c.Clears), c.Action})
	}
	return findings
}

// missingCapabilities is about MIG instances without the device nodes of their capabilities.
func missingCapabilities(r report.Report) []Finding {
	var missing, devices []string
	var remedy string
	for _, d := range r.Devices {
		nodes := slices.DeleteFunc(slices.Clone(d.MissingNodes), func(n string) bool { return !strings.Contains(n, "nvidia-caps") })
		if len(nodes) == 0 {
			continue
		}
		missing, devices = append(missing, nodes...), append(devices, string(d.ID))
		remedy = cmp.Or(remedy, d.CreateNodesCommand)
	}
	if len(devices) == 0 {
		return nil
	}
	if len(devices) > 1 {
		remedy += " (and so for each: " + list(devices[1:]) + ")"
	}
	return []Finding{{"devices", Problem, list(missing), "device nodes of MIG capabilities are missing, so containers can't use " + report.Noun(len(devices), "MIG instance"), remedy}}
}
