package status

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// everything is a reading of a GPU that reports all values, each another number.
func everything(id gpu.DeviceID) gpu.Usage {
	n := uint64(0)
	next := func() gpu.OptionalUint64 { n++; return gpu.OptionalUint64Of(n) }
	return gpu.Usage{
		Device: id, At: time.Unix(100, 0), Power: next(), PowerLimit: next(), GPU: next(), Memory: next(), Encoder: next(), Decoder: next(),
		Temperature: next(), MemoryUsed: next(), MemoryTotal: next(), BAR1Used: next(), BAR1Total: next(), ECCL1: next(), ECCL2: next(),
		ECCMemory: next(), ECCUncorrected: next(), ClockSM: next(), ClockMemory: next(), PCIeTransmitted: next(), PCIeReceived: next(),
		PCIeReplays: next(), PCIeGeneration: next(), PCIeWidth: next(), NVLinks: next(), NVLinkTransmitted: next(), NVLinkReceived: next(),
		NVLinkCRCErrors: next(), NVLinkReplays: next(), NVLinkRecoveries: next(),
	}
}

// Every number of a reading has its series, in base units.
func TestReadings(t *testing.T) {
	agent, id := read(core.DefaultConfig(), coretest.GPUs(1)), coretest.GPU(0)
	agent.use = use.Table{At: time.UnixMilli(100_500), Devices: []use.Device{{ID: id, Usage: everything(id)}}}
	of := func(labels string) string { return `{` + labels + `} ` }
	device := `device="` + string(id) + `"`
	want := []string{"tandem_use_last_read_timestamp_seconds 100.5", "tandem_holders_known 0"}
	for name, series := range map[string][]string{
		"power_watts": {of(device) + "0.001"}, "power_limit_watts": {of(device) + "0.002"}, "utilization_ratio": {of(device) + "0.03"},
		"memory_busy_ratio": {of(device) + "0.04"}, "encoder_utilization_ratio": {of(device) + "0.05"}, "decoder_utilization_ratio": {of(device) + "0.06"},
		"temperature_celsius": {of(device) + "7"}, "memory_used_bytes": {of(device) + "8"}, "memory_total_bytes": {of(device) + "9"},
		"bar1_used_bytes": {of(device) + "10"}, "bar1_total_bytes": {of(device) + "11"},
		"ecc_errors_total": {of(device+`,location="l1",severity="corrected"`) + "12", of(device+`,location="l2",severity="corrected"`) + "13",
			of(device+`,location="memory",severity="corrected"`) + "14", of(device+`,location="total",severity="uncorrected"`) + "15"},
		"clock_hertz":        {of(`clock="sm",`+device) + "1.6e+07", of(`clock="memory",`+device) + "1.7e+07"},
		"pcie_bytes_total":   {of(device+`,direction="transmit"`) + "18", of(device+`,direction="receive"`) + "19"},
		"pcie_replays_total": {of(device) + "20"}, "pcie_link_generation": {of(device) + "21"}, "pcie_link_width": {of(device) + "22"},
		"nvlinks":             {of(device) + "23"},
		"nvlink_bytes_total":  {of(device+`,direction="transmit"`) + "24576", of(device+`,direction="receive"`) + "25600"},
		"nvlink_errors_total": {of(device+`,type="crc"`) + "26", of(device+`,type="replay"`) + "27", of(device+`,type="recovery"`) + "28"},
	} {
		for _, s := range series {
			want = append(want, "tandem_device_"+name+s)
		}
	}
	has(t, agent.scrape(t), want...)
}

// A cause that is no condition of the GPU has a series with its action, too: one for all units of a device.
func TestCausesOfTheHost(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Policy.Shares = []inventory.Share{{Pool: "gpu", Sharing: inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 2}}}
	agent := read(cfg, coretest.GPUs(2))
	held := map[inventory.UnitID]string{}
	for u := range agent.state.Allocatable.Units() {
		if u.Device.ID == coretest.GPU(1) {
			held[u.ID] = "by pod a/b"
		}
	}
	agent.state.Allocatable = agent.state.Allocatable.Withhold(held)
	has(t, agent.scrape(t), fmt.Sprintf(
		`tandem_device_condition{action="end the workload, or wait for its end",cause="HELD",ci="",gi="",gpu=%q,simulated="false",state="unhealthy"} 1`, coretest.GPU(1)))
}

// step is a moment in the life of a device, with the series about it that then exist beside those of every offered device.
type step struct {
	name   string
	device use.Device
	known  bool // the record of holders was read
	want   string
}

// The series of an owner, of processes and of readings end with what they are about, whatever was before.
func TestSeriesEnd(t *testing.T) {
	id := coretest.GPU(0)
	pod := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: "train-0", Container: "main", ID: "uid-1"}
	claimed, job := pod, holders.Work{Orchestrator: holders.Nomad, Namespace: "default", Name: "job", Container: "task", ID: "alloc"}
	claimed.Claim = "gpu"
	hold := func(owners ...holders.Work) (holds []holders.Holder) {
		for _, o := range owners {
			holds = append(holds, holders.Holder{Work: o, Device: id})
		}
		return holds
	}
	busy := gpu.Usage{Device: id, At: time.Unix(90, 0), GPU: gpu.OptionalUint64Of(50)}
	since := time.Unix(40, 0)
	steps := []step{
		{"nothing known", use.Device{ID: id}, false, ""},
		{"free", use.Device{ID: id, Processes: []use.Process{}}, true, "held 0, processes 0, unreserved_processes 0"},
		{"held and busy", use.Device{ID: id, Holders: hold(pod), HeldSince: since, Usage: busy}, true, "held 1, idle_seconds 0, owner train-0 main 1, utilization_ratio 0.5"},
		{"twice by one container", use.Device{ID: id, Holders: hold(pod, claimed, job), HeldSince: since, IdleSince: time.Unix(70, 0)}, true,
			"held 1, idle_seconds 30, owner train-0 main 1, owner job task 1"},
		{"utilisation unknown", use.Device{ID: id, Holders: hold(job), HeldSince: since}, true, "held 1, owner job task 1"},
		{"record of holders lost", use.Device{ID: id, Processes: []use.Process{{Unreserved: true}}}, false, "processes 1"},
		{"a process without a reservation", use.Device{ID: id, Processes: []use.Process{{Unreserved: true}, {}}}, true, "held 0, processes 2, unreserved_processes 1"},
		{"nothing known again", use.Device{ID: id}, false, ""},
	}
	agent := read(core.DefaultConfig(), coretest.GPUs(1))
	base := map[string]bool{}
	for _, line := range agent.scrape(t) {
		base[line] = true
	}
	for _, from := range steps {
		for _, to := range steps {
			for _, s := range []step{from, to} { // one server: nothing of the first may be in the second scrape
				agent.use = use.Table{At: time.Unix(100, 0), HoldersKnown: s.known, Devices: []use.Device{s.device}}
				if got := aboutUse(agent.scrape(t), base); got != s.want {
					t.Fatalf("%s after %s: %q, want %q", s.name, from.name, got, s.want)
				}
			}
		}
	}
}

// aboutUse has the series of the use of a device in brief: "held 1, owner train-0 main 1".
func aboutUse(lines []string, base map[string]bool) string {
	var all []string
	for _, line := range lines {
		name, ok := strings.CutPrefix(line, "tandem_device_")
		if !ok || base[line] {
			continue
		}
		name, labels, _ := strings.Cut(name, "{")
		label := func(key string) string {
			_, after, ok := strings.Cut(labels, key+`="`)
			value, _, _ := strings.Cut(after, `"`)
			if !ok {
				return ""
			}
			return value + " "
		}
		value := line[strings.LastIndexByte(line, ' ')+1:]
		all = append(all, name+" "+label(",name")+label("container")+value)
	}
	return strings.Join(all, ", ")
}

// The series of a MIG instance end when it is destroyed, also while the latest table of use has it. A scrape later than that of the
// withdrawn device has its series in no other metric.
func TestSeriesOfADestroyedInstance(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	whole := coretest.GPUs(2)
	divided := coretest.WithMIG(whole, 1, "3g.40gb", "3g.40gb")
	agent := read(cfg, divided)
	var ids []gpu.DeviceID
	for u := range agent.state.Allocatable.Devices() {
		agent.use.Devices = append(agent.use.Devices, use.Device{ID: u.Device.ID, Usage: everything(u.Device.ID), Processes: []use.Process{}})
		if u.Device.Profile != "" {
			ids = append(ids, u.Device.ID)
		}
	}
	agent.use.At, agent.use.HoldersKnown = time.Unix(1, 0), true
	about := func(id gpu.DeviceID) (n int) {
		for _, line := range agent.scrape(t) {
			if strings.Contains(line, `"`+string(id)+`"`) {
				n++
			}
		}
		return n
	}
	if len(ids) != 2 || about(ids[0]) < 35 {
		t.Fatalf("%v: %d series", ids, about(ids[0]))
	}
	now := time.Unix(10, 0)
	agent.state = agent.state.Read(cfg, now, whole)
	agent = agent.observe(now.Add(time.Hour))
	for _, id := range ids {
		if n := about(id); n > 0 {
			t.Errorf("%d series of %s", n, id)
		}
	}
	if n := about(coretest.GPU(0)); n < 40 {
		t.Errorf("%d series of a GPU that is there", n)
	}
}

// The counters of driver calls.
func TestDriverCalls(t *testing.T) {
	agent := read(core.DefaultConfig(), coretest.GPUs(1))
	agent.calls = []gpu.CallCount{{Function: "nvmlDeviceGetUUID", Calls: 3, Errors: 1, Time: 1500 * time.Microsecond}}
	label := fmt.Sprintf("{function=%q} ", "nvmlDeviceGetUUID")
	has(t, agent.scrape(t), "tandem_driver_calls_total"+label+"3", "tandem_driver_call_errors_total"+label+"1", "tandem_driver_call_seconds_total"+label+"0.0015")
}
