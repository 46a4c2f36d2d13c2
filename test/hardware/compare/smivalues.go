package compare

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// known is a value, "" where nvidia-smi has a text for a missing one.
func known(text string) string {
	text = strings.TrimSpace(text)
	for _, missing := range []string{"N/A", "Unknown", "None detected", "Requested functionality has been deprecated", "ERR!", "Unknown Error", "GPU requires reset"} {
		if text == missing || strings.HasPrefix(text, "[") {
			return ""
		}
	}
	return text
}

// amount is the number of a value with a unit: "700.00 W", "81559 MiB", "16x", "27 C"; "" if there is none.
func amount(text string) string {
	number, _, _ := strings.Cut(known(text), " ")
	number = strings.TrimSuffix(number, "x")
	v, err := strconv.ParseFloat(number, 64)
	if err != nil {
		return ""
	}
	return strconv.FormatFloat(v, 'f', -1, 64)
}

// sum adds numbers; "" if none is there.
func sum(texts ...string) string {
	total, found := 0.0, false
	for _, text := range texts {
		if v, err := strconv.ParseFloat(amount(text), 64); err == nil {
			total, found = total+v, true
		}
	}
	if !found {
		return ""
	}
	return strconv.FormatFloat(total, 'f', -1, 64)
}

// values are those of a GPU.
func (g smiGPU) values(v Values) {
	v.set(PCIAddress, address(known(g.PCI.Address)))
	v.set(Name, known(g.Name))
	v.set(Architecture, known(g.Architecture))
	v.set(Brand, known(g.Brand))
	v.set(Serial, known(g.Serial))
	v.set(Minor, known(g.Minor))
	v.set(VBIOS, known(g.VBIOS))
	v.set(MIGMode, known(g.MIG))
	v.set(Persistence, known(g.Persistence))
	v.set(Display, cmp.Or(known(g.Display), map[string]string{"Yes": "Enabled", "No": "Disabled"}[g.Attached]))
	v.set(ECCMode, known(g.ECC))
	v.set(Memory, amount(g.Memory.Total))
	v.set(BAR1, amount(g.BAR1.Total))
	power := g.Power
	if power == (smiPower{}) {
		power = g.OldPower
	}
	v.set(PowerLimit, amount(cmp.Or(power.Current, power.Limit)))
	v.set(Power, amount(cmp.Or(known(power.Draw), known(power.Average))))
	v.set(MaxGraphicsClock, amount(g.MaxClocks.Graphics))
	v.set(MaxSMClock, amount(g.MaxClocks.SM))
	v.set(MaxMemoryClock, amount(g.MaxClocks.Memory))
	v.set(SMClock, amount(g.Clocks.SM))
	v.set(MemoryClock, amount(g.Clocks.Memory))
	v.set(Temperature, amount(g.Temperature))
	// The memory that is not free: that of processes and of the driver itself.
	if used := amount(g.Memory.Used); used != "" {
		v.set(MemoryUsed, sum(used, g.Memory.Reserved))
	}
	v.set(BAR1Used, amount(g.BAR1.Used))
	v.set(GPUUtilization, amount(g.Utilization.GPU))
	v.set(MemoryUtilization, amount(g.Utilization.Memory))
	v.set(EncoderUtilization, amount(g.Utilization.Encoder))
	v.set(DecoderUtilization, amount(g.Utilization.Decoder))
	g.linkValues(v)
	g.errorValues(v)
	v.set(Processes, pids(g.Processes, func(p smiProcess) bool { return known(p.GI) == "" }))
}

// linkValues are those of the PCIe link.
func (g smiGPU) linkValues(v Values) {
	v.set(MaxPCIeGeneration, amount(g.PCI.MaxGen))
	v.set(MaxPCIeWidth, amount(g.PCI.MaxWidth))
	v.set(PCIeGeneration, amount(g.PCI.Gen))
	v.set(PCIeWidth, amount(g.PCI.Width))
	v.set(PCIeReplays, amount(g.PCI.Replays))
	v.set(PCIeBandwidth, bandwidth(v[MaxPCIeGeneration], v[MaxPCIeWidth]))
}

// bandwidth is that of a link as the attribute pci_bandwidth has it: 256 MB/s for a lane of generation 1, twice that for each next.
func bandwidth(generation, width string) string {
	g, err1 := strconv.Atoi(generation)
	w, err2 := strconv.Atoi(width)
	if err1 != nil || err2 != nil || g < 1 || g > 6 {
		return ""
	}
	return strconv.Itoa(w * 256 << (g - 1))
}

// errorValues are the counters of errors, and what the driver recommends.
func (g smiGPU) errorValues(v Values) {
	e := g.Volatile
	v.set(ECCMemory, amount(cmp.Or(known(e.DRAMCorrectable), known(e.SingleMemory))))
	v.set(ECCL1, amount(e.SingleL1))
	v.set(ECCL2, amount(e.SingleL2))
	v.set(ECCUncorrected, cmp.Or(sum(e.DRAMUncorrectable, e.SRAMUncorrectable, e.SRAMParity, e.SRAMSECDED), amount(e.DoubleTotal)))
	v.set(RowsCorrectable, amount(g.Rows.Correctable))
	v.set(RowsUncorrectable, amount(g.Rows.Uncorrectable))
	v.set(RowPending, known(g.Rows.Pending))
	v.set(RowFailed, known(g.Rows.Failed))
	v.set(RecoveryAction, recoveryNames[strings.ToLower(known(g.Recovery))])
}

// recoveryNames are the agents' names of what nvidia-smi shows as the recovery action.
var recoveryNames = map[string]string{
	"none": "none", "reset": "GPU reset", "gpu reset": "GPU reset", "reboot": "node reboot", "node reboot": "node reboot",
	"drain p2p": "drain P2P", "drain and reset": "drain and reset", "recover imex domain": "recover IMEX domain",
}

// values are those of a MIG instance.
func (m smiMI) values(v Values, of smiGPU) {
	v.set(PCIAddress, address(known(of.PCI.Address)))
	v.set(Instance, known(m.Index))
	v.set(Memory, amount(m.Memory))
	v.set(MemoryUsed, amount(m.Used))
	v.set(BAR1, amount(m.BAR1))
	v.set(Multiprocessors, amount(m.SMs))
	v.set(CopyEngines, amount(m.Copies))
	v.set(Decoders, amount(m.Decoders))
	v.set(Encoders, amount(m.Encoders))
	v.set(JPEGDecoders, amount(m.JPEGs))
	v.set(OFAs, amount(m.OFAs))
	v.set(Serial, known(of.Serial))
	v.set(Architecture, known(of.Architecture))
	v.set(Brand, known(of.Brand))
	v.set(ECCMode, known(of.ECC))
	v.set(Processes, pids(of.Processes, func(p smiProcess) bool { return p.GI == m.GI && p.CI == m.CI }))
}

// pids are the compute processes for which of holds, sorted: "none" or "12 345".
func pids(all []smiProcess, of func(smiProcess) bool) string {
	var found []int
	for _, p := range all {
		if n, err := strconv.Atoi(strings.TrimSpace(p.PID)); err == nil && strings.Contains(p.Type, "C") && of(p) {
			found = append(found, n)
		}
	}
	return pidText(found)
}

func pidText(pids []int) string {
	if len(pids) == 0 {
		return "none"
	}
	slices.Sort(pids)
	var words []string
	for _, pid := range slices.Compact(pids) {
		words = append(words, strconv.Itoa(pid))
	}
	return strings.Join(words, " ")
}
