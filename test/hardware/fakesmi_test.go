package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/test/hardware/record"
)

// fakeSMI is nvidia-smi for a simulated machine: it prints what machine.conf has, not what NVML returns. The XML has the elements
// of nvsmi_device_v12.dtd that are compared, with its texts and units.
type fakeSMI struct {
	out      io.Writer
	sections map[string]record.Section
	gpus     []record.Section // with the defaults, by index
}

// fakeMain is the program nvidia-smi.
func fakeMain(root string, args []string) int {
	text, err := os.ReadFile(root + "/machine.conf")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	f := fakeSMI{out: os.Stdout, sections: record.Sections(string(text))}
	for i := 0; f.sections[fmt.Sprintf("gpu %d", i)] != nil; i++ {
		merged := record.Section{}
		for _, s := range []record.Section{f.sections["defaults"], f.sections[fmt.Sprintf("gpu %d", i)]} {
			for key, values := range s {
				merged[key] = values
			}
		}
		f.gpus = append(f.gpus, merged)
	}
	switch command := strings.Join(args, " "); {
	case command == "-q -x":
		f.xml()
	case command == "-L":
		f.list(true)
	case command == "nvlink -s":
		f.list(false)
	case command == "topo -m":
		f.topology()
	case command == "mig -lgi":
		fmt.Fprintln(f.out, "No MIG-enabled devices found.")
		return 6
	case strings.HasPrefix(command, "--query-gpu="):
		for _, g := range f.gpus {
			fmt.Fprintf(f.out, "%s, %s\n", g["uuid"][0], g["compute"][0])
		}
	default:
		fmt.Fprintln(os.Stderr, "Invalid combination of input arguments.")
		return 2
	}
	return 0
}

// value is a value of a GPU in a unit, "N/A" if it has none.
func value(g record.Section, key string, scale float64, format string) string {
	if len(g[key]) == 0 || g[key][0] == "none" {
		return "N/A"
	}
	n, err := strconv.ParseFloat(g[key][0], 64)
	if err != nil || scale == 0 {
		return g[key][0]
	}
	return fmt.Sprintf(format, n/scale)
}

func toggle(g record.Section, key string, words ...string) string {
	switch value(g, key, 0, "") {
	case "yes":
		return words[0]
	case "no":
		return words[1]
	}
	return "N/A"
}

var brands = map[string]string{"nvidia": "NVIDIA", "geforce_rtx": "GeForce RTX", "tesla": "Tesla"}

func (f fakeSMI) xml() {
	m := f.sections["machine"]
	fmt.Fprintf(f.out, "<?xml version=\"1.0\" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM \"nvsmi_device_v12.dtd\">\n<nvidia_smi_log>\n<driver_version>%s</driver_version>\n<cuda_version>%s</cuda_version>\n<attached_gpus>%d</attached_gpus>\n", m["driver"][0], m["cuda"][0], len(f.gpus))
	for _, g := range f.gpus {
		f.gpu(g)
	}
	fmt.Fprintln(f.out, "</nvidia_smi_log>")
}

// elements prints elements with their texts, each in elements of its own. nvidia-smi has those of one name together.
func (f fakeSMI) elements(pairs ...string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		path := strings.Split(pairs[i], "/")
		for _, name := range path {
			fmt.Fprintf(f.out, "<%s>", name)
		}
		fmt.Fprint(f.out, pairs[i+1])
		for _, name := range slices.Backward(path) {
			fmt.Fprintf(f.out, "</%s>", name)
		}
		fmt.Fprintln(f.out)
	}
}

func (f fakeSMI) gpu(g record.Section) {
	const mib = 1 << 20
	pci := strings.ToUpper("0000" + g["pci"][0])
	underMIG := func(text string) string {
		if value(g, "mig", 0, "") == "yes" {
			return "N/A"
		}
		return text
	}
	architecture := value(g, "arch", 0, "")
	brand := value(g, "brand", 0, "")
	fmt.Fprintf(f.out, "<gpu id=\"%s\">\n", pci)
	f.elements(
		"product_name", g["name"][0], "product_brand", brands[brand], "product_architecture", strings.ToUpper(architecture[:1])+architecture[1:],
		"display_mode", toggle(g, "display_mode", "Enabled", "Disabled"), "persistence_mode", toggle(g, "persistence", "Enabled", "Disabled"),
		"mig_mode/current_mig", toggle(g, "mig", "Enabled", "Disabled"), "serial", value(g, "serial", 0, ""), "uuid", g["uuid"][0],
		"minor_number", value(g, "minor", 0, ""), "vbios_version", value(g, "vbios", 0, ""), "pci/pci_bus_id", pci,
		"pci/pci_gpu_link_info/pcie_gen/max_link_gen", value(g, "max_pcie_gen", 0, ""), "pci/pci_gpu_link_info/pcie_gen/current_link_gen", value(g, "pcie_gen", 0, ""),
		"pci/pci_gpu_link_info/link_widths/max_link_width", value(g, "max_pcie_width", 1, "%.0fx"),
		"pci/pci_gpu_link_info/link_widths/current_link_width", value(g, "pcie_width", 1, "%.0fx"), "pci/replay_counter", value(g, "pcie_replays", 0, ""),
		"fb_memory_usage/total", value(g, "memory", mib, "%.0f MiB"), "fb_memory_usage/reserved", value(g, "memory_reserved", mib, "%.0f MiB"),
		"fb_memory_usage/used", value(g, "memory_used", mib, "%.0f MiB"),
		"bar1_memory_usage/total", value(g, "bar1", mib, "%.0f MiB"), "bar1_memory_usage/used", value(g, "bar1_used", mib, "%.0f MiB"),
		"utilization/gpu_util", underMIG(value(g, "utilization_gpu", 1, "%.0f %%")), "utilization/memory_util", underMIG(value(g, "utilization_memory", 1, "%.0f %%")),
		"utilization/encoder_util", underMIG(value(g, "encoder", 1, "%.0f %%")), "utilization/decoder_util", underMIG(value(g, "decoder", 1, "%.0f %%")),
		"ecc_errors/volatile/dram_correctable", value(g, "ecc_device", 0, ""), "ecc_errors/volatile/dram_uncorrectable", value(g, "ecc_uncorrected_volatile", 0, ""),
		"gpu_power_readings/power_draw", value(g, "power_usage", 1000, "%.2f W"), "gpu_power_readings/current_power_limit", value(g, "power_limit", 1000, "%.2f W"),
		"max_clocks/graphics_clock", value(g, "max_clock_graphics", 1, "%.0f MHz"), "max_clocks/sm_clock", value(g, "max_clock_sm", 1, "%.0f MHz"),
		"max_clocks/mem_clock", value(g, "max_clock_memory", 1, "%.0f MHz"),
		"clocks/sm_clock", value(g, "clock_sm", 1, "%.0f MHz"), "clocks/mem_clock", value(g, "clock_memory", 1, "%.0f MHz"),
		"ecc_mode/current_ecc", toggle(g, "ecc", "Enabled", "Disabled"), "temperature/gpu_temp", value(g, "temperature", 1, "%.0f C"),
		"gpu_recovery_action", map[string]string{"0": "None", "1": "Reset", "N/A": "N/A"}[value(g, "recovery_action", 0, "")])
	if len(g["instance"]) == 0 {
		f.elements("remapped_rows/remapped_row_corr", value(g, "remapped_correctable", 0, ""), "remapped_rows/remapped_row_pending", toggle(g, "remapped_pending", "Yes", "No"))
	}
	for _, line := range g["process"] {
		words := append(strings.Fields(line), "N/A", "N/A")
		const of = "<processes><process_info><gpu_instance_id>%s</gpu_instance_id><compute_instance_id>%s</compute_instance_id><pid>%s</pid><type>C</type></process_info></processes>\n"
		fmt.Fprintf(f.out, of, words[2], words[3], words[0])
	}
	f.instances(g)
	fmt.Fprintln(f.out, "</gpu>")
}

// instances prints the MIG instances of a GPU.
func (f fakeSMI) instances(g record.Section) {
	if len(g["instance"]) == 0 {
		fmt.Fprintln(f.out, "<mig_devices>\n\tNone\n</mig_devices>")
		return
	}
	fmt.Fprintln(f.out, "<mig_devices>")
	for i, line := range g["instance"] {
		words := simdriverInstance(line)
		p := f.sections["profile "+words["profile"]]
		size, _ := strconv.ParseFloat(p["size"][0], 64)
		bar1, _ := strconv.ParseFloat(g["bar1"][0], 64)
		slicesOfGPU := 8.0
		if g["mig_slices"] != nil {
			slicesOfGPU, _ = strconv.ParseFloat(g["mig_slices"][0], 64)
		}
		count := func(key string) string {
			if p[key] == nil {
				return "0"
			}
			return p[key][0]
		}
		fmt.Fprintln(f.out, "<mig_device>")
		const attributes = "device_attributes/shared/"
		f.elements("index", strconv.Itoa(i), "gpu_instance_id", words["gi"], "compute_instance_id", words["ci"],
			attributes+"multiprocessor_count", count("multiprocessors"), attributes+"copy_engine_count", count("copy_engines"),
			attributes+"encoder_count", count("encoders"), attributes+"decoder_count", count("decoders"),
			attributes+"ofa_count", count("ofas"), attributes+"jpg_count", count("jpegs"),
			"fb_memory_usage/total", value(p, "memory", 1<<20, "%.0f MiB"), "bar1_memory_usage/total", fmt.Sprintf("%.0f MiB", bar1*size/slicesOfGPU/(1<<20)))
		fmt.Fprintln(f.out, "</mig_device>")
	}
	fmt.Fprintln(f.out, "</mig_devices>")
}

// simdriverInstance are the words of a line "1g.10gb gi=7 ci=0 uuid=MIG-...".
func simdriverInstance(line string) map[string]string {
	fields := strings.Fields(line)
	words := map[string]string{"profile": fields[0]}
	for _, field := range fields[1:] {
		key, text, _ := strings.Cut(field, "=")
		words[key] = text
	}
	return words
}

// list is -L, or nvlink -s.
func (f fakeSMI) list(instances bool) {
	for i, g := range f.gpus {
		fmt.Fprintf(f.out, "GPU %d: %s (UUID: %s)\n", i, g["name"][0], g["uuid"][0])
		for n, line := range g["instance"] {
			if words := simdriverInstance(line); instances {
				fmt.Fprintf(f.out, "  MIG %-13s Device %2d: (UUID: %s)\n", words["profile"], n, words["uuid"])
			}
		}
		for _, line := range f.sections["links"]["nvlink"] {
			links, of, _ := strings.Cut(line, " ")
			for n := 0; !instances && of == "all" && strconv.Itoa(n) != links; n++ {
				fmt.Fprintf(f.out, "\t Link %d: 26.562 GB/s\n", n)
			}
		}
	}
}

// topology is topo -m of a machine in which all GPUs have NVLinks to switches.
func (f fakeSMI) topology() {
	fmt.Fprint(f.out, "\t\x1b[4m")
	for i := range f.gpus {
		fmt.Fprintf(f.out, "GPU%d\t", i)
	}
	fmt.Fprintln(f.out, "CPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m")
	for i, g := range f.gpus {
		fmt.Fprintf(f.out, "GPU%d\t", i)
		for j := range f.gpus {
			cell := " X "
			if links := f.sections["links"]["nvlink"]; i != j && len(links) > 0 {
				cell = "NV" + strings.Fields(links[0])[0]
			} else if i != j {
				cell = "SYS"
			}
			fmt.Fprint(f.out, cell, "\t")
		}
		fmt.Fprintf(f.out, "0-55\t%s\tN/A\n", value(g, "numa", 0, ""))
	}
	fmt.Fprintln(f.out, "\nLegend:\n\n  X    = Self")
}
