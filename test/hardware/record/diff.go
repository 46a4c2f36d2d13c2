package record

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Section is a section of a machine file: the values of each key, in the units of the library (bytes, milliwatts).
type Section map[string][]string

// Sections parses a machine file. Values with units are numbers in the result, so that equal values are equal texts.
func Sections(text string) map[string]Section {
	all, head := map[string]Section{}, ""
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(" "+line, " #")
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "#") || line == "" {
			continue
		}
		if strings.HasPrefix(line, "[") {
			head = strings.Trim(line, "[]")
			all[head] = Section{}
			continue
		}
		name, value, _ := strings.Cut(line, "=")
		name = strings.TrimSpace(name)
		all[head][name] = append(all[head][name], Normal(strings.TrimSpace(value)))
	}
	return all
}

var units = map[string]uint64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "W": 1000, "J": 1000, "s": 1000, "mW": 1, "mJ": 1, "MHz": 1, "C": 1, "%": 1, "ns": 1}

// Normal is a value without its unit.
func Normal(value string) string {
	amount, unit, ok := strings.Cut(value, " ")
	if !ok {
		if n, err := strconv.ParseUint(value, 0, 64); err == nil && strings.HasPrefix(value, "0x") {
			return strconv.FormatUint(n, 10)
		}
		return value
	}
	n, err := strconv.ParseUint(amount, 10, 64)
	scale, known := units[unit]
	if err != nil || !known {
		return value
	}
	return strconv.FormatUint(n*scale, 10)
}

// momentary are the keys whose values change by themselves: only whether there is a value is compared.
var momentary = []string{
	"memory_used", "bar1_used", "power_usage", "energy", "clock_graphics", "clock_sm", "clock_memory", "clock_video", "temperature",
	"memory_temperature", "margin_temperature", "fan", "pstate", "pcie_gen", "pcie_width", "pcie_tx", "pcie_rx", "pcie_tx_bytes",
	"pcie_rx_bytes", "utilization_gpu", "utilization_memory", "encoder", "decoder", "clock_reasons", "nvlink_tx_kib", "nvlink_rx_kib",
	"sw_power_cap_ns", "reliability_ns", "sw_thermal_slowdown_ns", "hw_thermal_slowdown_ns", "hw_power_brake_ns", "pcie_replays",
}

// Difference is a key of which a driver and a machine file differ.
type Difference struct {
	Key       string `json:"key"`
	Function  string `json:"function"`
	Driver    string `json:"driver"`    // value, or what the function returns
	Simulated string `json:"simulated"` // value in the machine file; "NOT_SUPPORTED" = it has none
}

// Model finds the machine of the simulated driver with the GPU model of a recording, of several the one that differs least; "" if there is
// none.
func Model(r Recording) (model string) {
	least := -1
	for _, machine := range simdriver.Names() {
		text, err := simdriver.Text(machine)
		if err != nil || !slices.Equal(Sections(text)["defaults"]["name"], []string{r.GPUs[0].Values["name"]}) {
			continue
		}
		if n := len(Compare(r, text)); least < 0 || n < least {
			model, least = machine, n
		}
	}
	return model
}

// Compare compares what the first GPU of a recording answers with a machine file of the simulated driver: which calls have a
// value, and the values that do not change by themselves and are not of one board.
func Compare(r Recording, machine string) []Difference {
	var differences []Difference
	all := Sections(machine)
	simulated := Section{}
	maps.Copy(simulated, all["defaults"])
	maps.Copy(simulated, all["gpu 0"])
	seen := map[string]bool{}
	for _, a := range r.Answers {
		if a.GPU != 0 || seen[a.Key] || slices.Contains(own, a.Key) || !slices.Contains(order(), a.Key) || strings.HasSuffix(a.Key, "_pending") && a.Return == "SUCCESS" && simulated[a.Key] == nil {
			continue
		}
		seen[a.Key] = true
		d := Difference{Key: a.Key, Function: a.Function, Driver: a.Return, Simulated: "NOT_SUPPORTED"}
		value := simulated[a.Key]
		if len(value) > 0 && (value[0] != "none" || a.Key == "virtualization") {
			d.Simulated = value[0]
		}
		if a.Return == "SUCCESS" {
			d.Driver = Normal(a.Value)
			if d.Simulated != "NOT_SUPPORTED" && slices.Contains(momentary, a.Key) {
				d.Simulated = d.Driver
			}
		}
		if d.Driver != d.Simulated {
			differences = append(differences, d)
		}
	}
	return differences
}
