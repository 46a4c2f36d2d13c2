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

// smiValue is a value that nvidia-smi shows, and the paths of its element in nvsmi_device_v11 to v13, of which the first that is known
// counts.
type smiValue struct {
	value Value
	form  func(string) string
	paths []string
}

func in(paths ...string) []string { return paths }

func unchanged(text string) string { return text }

var gpuValues = []smiValue{
	{PCIAddress, address, in("pci/pci_bus_id")},
	{Name, unchanged, in("product_name")},
	{Architecture, unchanged, in("product_architecture")},
	{Brand, unchanged, in("product_brand")},
	{Serial, unchanged, in("serial")},
	{Minor, unchanged, in("minor_number")},
	{VBIOS, unchanged, in("vbios_version")},
	{MIGMode, unchanged, in("mig_mode/current_mig")},
	{Persistence, unchanged, in("persistence_mode")},
	{Display, displayMode, in("display_mode", "display_attached")}, // the latter in v13
	{ECCMode, unchanged, in("ecc_mode/current_ecc")},
	{Memory, amount, in("fb_memory_usage/total")},
	{BAR1, amount, in("bar1_memory_usage/total")},
	{BAR1Used, amount, in("bar1_memory_usage/used")},
	// gpu_power_readings from driver 525 on, current_power_limit from driver 535 on, average_power_draw in v13.
	{PowerLimit, amount, in("gpu_power_readings/current_power_limit", "gpu_power_readings/power_limit", "power_readings/power_limit")},
	{Power, amount, in("gpu_power_readings/power_draw", "gpu_power_readings/average_power_draw", "power_readings/power_draw")},
	{MaxGraphicsClock, amount, in("max_clocks/graphics_clock")},
	{MaxSMClock, amount, in("max_clocks/sm_clock")},
	{MaxMemoryClock, amount, in("max_clocks/mem_clock")},
	{SMClock, amount, in("clocks/sm_clock")},
	{MemoryClock, amount, in("clocks/mem_clock")},
	{Temperature, amount, in("temperature/gpu_temp")},
	{GPUUtilization, amount, in("utilization/gpu_util")},
	{MemoryUtilization, amount, in("utilization/memory_util")},
	{EncoderUtilization, amount, in("utilization/encoder_util")},
	{DecoderUtilization, amount, in("utilization/decoder_util")},
	{MaxPCIeGeneration, amount, in("pci/pci_gpu_link_info/pcie_gen/max_link_gen")},
	{MaxPCIeWidth, amount, in("pci/pci_gpu_link_info/link_widths/max_link_width")},
	{PCIeGeneration, amount, in("pci/pci_gpu_link_info/pcie_gen/current_link_gen")},
	{PCIeWidth, amount, in("pci/pci_gpu_link_info/link_widths/current_link_width")},
	{PCIeReplays, amount, in("pci/replay_counter")},
	// Errors are counted by memory from Ampere on, before by single and double bit.
	{ECCMemory, amount, in("ecc_errors/volatile/dram_correctable", "ecc_errors/volatile/single_bit/device_memory")},
	{ECCL1, amount, in("ecc_errors/volatile/single_bit/l1_cache")},
	{ECCL2, amount, in("ecc_errors/volatile/single_bit/l2_cache")},
	{RowsCorrectable, amount, in("remapped_rows/remapped_row_corr")},
	{RowsUncorrectable, amount, in("remapped_rows/remapped_row_unc")},
	{RowPending, unchanged, in("remapped_rows/remapped_row_pending")},
	{RowFailed, unchanged, in("remapped_rows/remapped_row_failure")},
	{RecoveryAction, func(text string) string { return recoveryNames[strings.ToLower(text)] }, in("gpu_recovery_action")},
}

var instanceValues = []smiValue{
	{Instance, unchanged, in("index")},
	{Memory, amount, in("fb_memory_usage/total")},
	{MemoryUsed, amount, in("fb_memory_usage/used")},
	{BAR1, amount, in("bar1_memory_usage/total")},
	{Multiprocessors, amount, in("device_attributes/shared/multiprocessor_count")},
	{CopyEngines, amount, in("device_attributes/shared/copy_engine_count")},
	{Decoders, amount, in("device_attributes/shared/decoder_count")},
	{Encoders, amount, in("device_attributes/shared/encoder_count")},
	{JPEGDecoders, amount, in("device_attributes/shared/jpg_count")},
	{OFAs, amount, in("device_attributes/shared/ofa_count")},
}

func (v Values) addSMI(of element, all []smiValue) {
	for _, value := range all {
		v.set(value.value, value.form(of.text(value.paths...)))
	}
}

// addGPU adds the values of a GPU.
func (v Values) addGPU(g element) {
	v.addSMI(g, gpuValues)
	// The memory that is not free: that of processes and of the driver itself.
	if used := amount(g.text("fb_memory_usage/used")); used != "" {
		v.set(MemoryUsed, sum(used, g.text("fb_memory_usage/reserved")))
	}
	// From driver 550 on there are two counters of SRAM in place of one.
	const errors = "ecc_errors/volatile/"
	uncorrectable := sum(g.text(errors+"dram_uncorrectable"), g.text(errors+"sram_uncorrectable"),
		g.text(errors+"sram_uncorrectable_parity"), g.text(errors+"sram_uncorrectable_secded"))
	v.set(ECCUncorrected, cmp.Or(uncorrectable, amount(g.text(errors+"double_bit/total"))))
	v.set(PCIeBandwidth, bandwidth(v[MaxPCIeGeneration], v[MaxPCIeWidth]))
	v.set(Processes, processes(g, "", ""))
}

// addInstance adds the values of a MIG instance of a GPU.
func (v Values) addInstance(instance, g element, parent Values) {
	v.addSMI(instance, instanceValues)
	for _, shared := range []Value{PCIAddress, Serial, Architecture, Brand, ECCMode} {
		v.set(shared, parent[shared])
	}
	v.set(Processes, processes(g, instance.text("gpu_instance_id"), instance.text("compute_instance_id")))
}

// displayMode is the mode, or that of a GPU to which a display is attached or not.
func displayMode(text string) string {
	return cmp.Or(map[string]string{"Yes": "Enabled", "No": "Disabled"}[text], text)
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

// recoveryNames are the agents' names of what nvidia-smi shows as the recovery action.
var recoveryNames = map[string]string{
	"none": "none", "reset": "GPU reset", "gpu reset": "GPU reset", "reboot": "node reboot", "node reboot": "node reboot",
	"drain p2p": "drain P2P", "drain and reset": "drain and reset", "recover imex domain": "recover IMEX domain",
	"bus reset": "bus reset", "reset bus": "bus reset", "system reboot": "system reboot", "reboot system": "system reboot",
}

// processes are the compute processes of an instance, or "" and "" for those of the GPU, sorted: "none" or "12 345".
func processes(g element, gi, ci string) string {
	var found []int
	for _, p := range g.all("processes/process_info") {
		of := p.text("gpu_instance_id") == gi && (gi == "" || p.text("compute_instance_id") == ci)
		if n, err := strconv.Atoi(p.text("pid")); err == nil && strings.Contains(p.text("type"), "C") && of { // C, G, C+G
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
