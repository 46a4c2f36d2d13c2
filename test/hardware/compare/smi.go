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

// element is an element of `nvidia-smi -q -x`.
type element struct {
	XMLName  xml.Name
	Text     string    `xml:",chardata"`
	Elements []element `xml:",any"`
}

// all are the elements at a path: "mig_devices/mig_device".
func (e element) all(path string) []element {
	at := []element{e}
	for name := range strings.SplitSeq(path, "/") {
		var next []element
		for _, parent := range at {
			for _, child := range parent.Elements {
				if child.XMLName.Local == name {
					next = append(next, child)
				}
			}
		}
		at = next
	}
	return at
}

// text is that of the first path at which there is a known one; "" = none.
func (e element) text(paths ...string) string {
	for _, path := range paths {
		for _, found := range e.all(path) {
			if text := known(found.Text); text != "" {
				return text
			}
		}
	}
	return ""
}

// Source parses the outputs.
func (s SMI) Source() (Source, error) {
	var log element
	if err := xml.Unmarshal([]byte(s.XML), &log); err != nil {
		return Source{}, fmt.Errorf("nvidia-smi -q -x: %w", err)
	}
	all := NewSource("nvidia-smi")
	all.Machine.set(DriverVersion, log.text("driver_version"))
	all.Machine.set(CUDAVersion, log.text("cuda_version"))
	gpus := log.all("gpu")
	all.Machine.set(GPUCount, strconv.Itoa(len(gpus)))
	ids := make([]string, len(gpus))
	listed := s.instances()
	for i, g := range gpus {
		ids[i] = g.text("uuid")
		parent := all.Device(ids[i])
		parent.addGPU(g)
		parent.set(Index, strconv.Itoa(i))
		for _, instance := range g.all("mig_devices/mig_device") {
			index := instance.text("index")
			l, ok := listed[ids[i]+" "+index]
			if !ok {
				return all, fmt.Errorf("nvidia-smi -L does not list instance %s of %s", index, ids[i])
			}
			v := all.Device(l.uuid)
			v.set(Profile, l.profile)
			v.addInstance(instance, g, parent)
		}
	}
	s.addQuery(all)
	s.addNVLinks(all)
	s.addTopology(all, ids)
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

// addTopology adds the connection of each pair of GPUs, and the NUMA node of each; ids are their UUIDs by index.
func (s SMI) addTopology(all Source, ids []string) {
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
		if !isGPU || err != nil || i >= len(ids) {
			continue
		}
		for n, cell := range cells {
			switch name := column(columns, n); {
			case name == "NUMA Affinity":
				if _, err := strconv.Atoi(cell); err == nil {
					all.Device(ids[i]).set(NUMANode, cell)
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
