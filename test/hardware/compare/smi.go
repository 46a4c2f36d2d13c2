package compare

import (
	"encoding/csv"
	"encoding/xml"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// SMI is the output of the commands of nvidia-smi. What a command did not print is empty.
type SMI struct {
	XML    string // -q -x
	List   string // -L
	Query  string // --query-gpu=uuid,... --format=csv,noheader,nounits
	NVLink string // nvlink -s
	Topo   string // topo -m
}

// QueryFields are the fields of --query-gpu that the XML of some driver lacks; the first is the UUID.
var QueryFields = []string{"uuid", "compute_cap"}

// smiLog has the elements of `nvidia-smi -q -x` (nvsmi_device_v11 to v13) that are compared. Where versions differ, each spelling
// is an element of its own.
type smiLog struct {
	Driver string   `xml:"driver_version"`
	CUDA   string   `xml:"cuda_version"`
	GPUs   []smiGPU `xml:"gpu"`
}

type smiGPU struct {
	UUID         string  `xml:"uuid"`
	Name         string  `xml:"product_name"`
	Brand        string  `xml:"product_brand"`
	Architecture string  `xml:"product_architecture"`
	Serial       string  `xml:"serial"`
	Minor        string  `xml:"minor_number"`
	VBIOS        string  `xml:"vbios_version"`
	Display      string  `xml:"display_mode"`
	Attached     string  `xml:"display_attached"` // v13, in place of the mode
	Persistence  string  `xml:"persistence_mode"`
	MIG          string  `xml:"mig_mode>current_mig"`
	Instances    []smiMI `xml:"mig_devices>mig_device"`
	Recovery     string  `xml:"gpu_recovery_action"`
	PCI          struct {
		Address  string `xml:"pci_bus_id"`
		MaxGen   string `xml:"pci_gpu_link_info>pcie_gen>max_link_gen"`
		Gen      string `xml:"pci_gpu_link_info>pcie_gen>current_link_gen"`
		MaxWidth string `xml:"pci_gpu_link_info>link_widths>max_link_width"`
		Width    string `xml:"pci_gpu_link_info>link_widths>current_link_width"`
		Replays  string `xml:"replay_counter"`
	} `xml:"pci"`
	Memory struct {
		Total    string `xml:"total"`
		Reserved string `xml:"reserved"`
		Used     string `xml:"used"`
	} `xml:"fb_memory_usage"`
	BAR1 struct {
		Total string `xml:"total"`
		Used  string `xml:"used"`
	} `xml:"bar1_memory_usage"`
	Utilization struct {
		GPU     string `xml:"gpu_util"`
		Memory  string `xml:"memory_util"`
		Encoder string `xml:"encoder_util"`
		Decoder string `xml:"decoder_util"`
	} `xml:"utilization"`
	ECC      string    `xml:"ecc_mode>current_ecc"`
	Volatile smiErrors `xml:"ecc_errors>volatile"`
	Rows     struct {
		Correctable   string `xml:"remapped_row_corr"`
		Uncorrectable string `xml:"remapped_row_unc"`
		Pending       string `xml:"remapped_row_pending"`
		Failed        string `xml:"remapped_row_failure"`
	} `xml:"remapped_rows"`
	Temperature string       `xml:"temperature>gpu_temp"`
	Power       smiPower     `xml:"gpu_power_readings"` // from driver 525 on
	OldPower    smiPower     `xml:"power_readings"`
	Clocks      smiClocks    `xml:"clocks"`
	MaxClocks   smiClocks    `xml:"max_clocks"`
	Processes   []smiProcess `xml:"processes>process_info"`
}

// smiErrors are counters of ECC errors: by memory from Ampere on, before by single and double bit.
type smiErrors struct {
	DRAMCorrectable   string `xml:"dram_correctable"`
	DRAMUncorrectable string `xml:"dram_uncorrectable"`
	SRAMUncorrectable string `xml:"sram_uncorrectable"`
	SRAMParity        string `xml:"sram_uncorrectable_parity"` // from driver 550 on, with the next one in place of one counter
	SRAMSECDED        string `xml:"sram_uncorrectable_secded"`
	SingleMemory      string `xml:"single_bit>device_memory"`
	SingleL1          string `xml:"single_bit>l1_cache"`
	SingleL2          string `xml:"single_bit>l2_cache"`
	DoubleTotal       string `xml:"double_bit>total"`
}

type smiPower struct {
	Draw    string `xml:"power_draw"`
	Average string `xml:"average_power_draw"` // v13
	Current string `xml:"current_power_limit"`
	Limit   string `xml:"power_limit"` // before driver 535
}

type smiClocks struct {
	Graphics string `xml:"graphics_clock"`
	SM       string `xml:"sm_clock"`
	Memory   string `xml:"mem_clock"`
}

type smiProcess struct {
	PID  string `xml:"pid"`
	Type string `xml:"type"` // C, G, C+G
	GI   string `xml:"gpu_instance_id"`
	CI   string `xml:"compute_instance_id"`
}

// smiMI is a MIG instance.
type smiMI struct {
	Index    string `xml:"index"`
	GI       string `xml:"gpu_instance_id"`
	CI       string `xml:"compute_instance_id"`
	SMs      string `xml:"device_attributes>shared>multiprocessor_count"`
	Copies   string `xml:"device_attributes>shared>copy_engine_count"`
	Decoders string `xml:"device_attributes>shared>decoder_count"`
	Encoders string `xml:"device_attributes>shared>encoder_count"`
	JPEGs    string `xml:"device_attributes>shared>jpg_count"`
	OFAs     string `xml:"device_attributes>shared>ofa_count"`
	Memory   string `xml:"fb_memory_usage>total"`
	Used     string `xml:"fb_memory_usage>used"`
	BAR1     string `xml:"bar1_memory_usage>total"`
}

// Source parses the outputs.
func (s SMI) Source() (Source, error) {
	var log smiLog
	if err := xml.Unmarshal([]byte(s.XML), &log); err != nil {
		return Source{}, fmt.Errorf("nvidia-smi -q -x: %w", err)
	}
	all := NewSource("nvidia-smi")
	all.Machine.set(DriverVersion, known(log.Driver))
	all.Machine.set(CUDAVersion, known(log.CUDA))
	all.Machine.set(GPUCount, strconv.Itoa(len(log.GPUs)))
	listed := s.instances()
	for i, g := range log.GPUs {
		g.values(all.Device(g.UUID))
		all.Device(g.UUID).set(Index, strconv.Itoa(i))
		for _, mi := range g.Instances {
			l, ok := listed[g.UUID+" "+mi.Index]
			if !ok {
				return all, fmt.Errorf("nvidia-smi -L does not list instance %s of %s", mi.Index, g.UUID)
			}
			v := all.Device(l.uuid)
			v.set(Profile, l.profile)
			mi.values(v, g)
		}
	}
	s.addQuery(all)
	s.addNVLinks(all)
	s.addTopology(all, log)
	return all, nil
}

// address is a PCI address as the agents write it.
func address(text string) string {
	a, err := gpu.ParsePCIAddress(text)
	if err != nil {
		return text
	}
	return string(a)
}

type listedInstance struct{ uuid, profile string }

var (
	gpuLine      = regexp.MustCompile(`^GPU \d+: .*\(UUID: (GPU-[^)]+)\)`)
	instanceLine = regexp.MustCompile(`^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)`)
)

// instances are the MIG instances of -L, which alone has their UUIDs, by UUID of the GPU and index.
func (s SMI) instances() map[string]listedInstance {
	all, parent := map[string]listedInstance{}, ""
	for line := range strings.Lines(s.List) {
		if m := gpuLine.FindStringSubmatch(line); m != nil {
			parent = m[1]
		}
		if m := instanceLine.FindStringSubmatch(line); m != nil {
			all[parent+" "+m[2]] = listedInstance{m[3], m[1]}
		}
	}
	return all
}

// addQuery adds the values of --query-gpu.
func (s SMI) addQuery(all Source) {
	r := csv.NewReader(strings.NewReader(s.Query))
	r.TrimLeadingSpace = true
	rows, err := r.ReadAll()
	if err != nil {
		return // the table has the values as those that only the agents have
	}
	for _, row := range rows {
		if len(row) == len(QueryFields) {
			all.Device(row[0]).set(ComputeCapability, known(row[1]))
		}
	}
}

// addNVLinks counts the active links.
func (s SMI) addNVLinks(all Source) {
	parent := ""
	count := map[string]int{}
	for line := range strings.Lines(s.NVLink) {
		if m := gpuLine.FindStringSubmatch(line); m != nil {
			parent = m[1]
		} else if strings.Contains(line, "GB/s") {
			count[parent]++
		}
	}
	for id, n := range count {
		all.Device(id).set(NVLinks, strconv.Itoa(n))
	}
}

// addTopology adds the connection of each pair of GPUs, and the NUMA node of each.
func (s SMI) addTopology(all Source, log smiLog) {
	var columns []string
	for line := range strings.Lines(s.Topo) {
		cells := strings.Split(strings.TrimRight(ansi.ReplaceAllString(line, ""), "\n"), "\t")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		if columns == nil {
			columns = cells
			continue
		}
		row, isGPU := strings.CutPrefix(cells[0], "GPU")
		i, err := strconv.Atoi(row)
		if !isGPU || err != nil || i >= len(log.GPUs) {
			continue
		}
		for n, cell := range cells {
			switch name := column(columns, n); {
			case name == "NUMA Affinity":
				if _, err := strconv.Atoi(cell); err == nil {
					all.Device(log.GPUs[i].UUID).set(NUMANode, cell)
				}
			case strings.HasPrefix(name, "GPU"):
				if j, err := strconv.Atoi(name[len("GPU"):]); err == nil && j > i {
					all.Machine.set(Connection(i, j), cell)
				}
			}
		}
	}
}

// ansi are the escapes with which nvidia-smi underlines the heading.
var ansi = regexp.MustCompile("\x1b\\[[0-9;]*m")

func column(columns []string, n int) string {
	if n < len(columns) {
		return columns[n]
	}
	return ""
}
