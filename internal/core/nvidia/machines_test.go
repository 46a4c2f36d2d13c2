package nvidia

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// TestMachines compares a Snapshot of every machine with testdata/NAME.golden, and with the next Snapshot of the session and
// of another session.
func TestMachines(t *testing.T) {
	for _, name := range simdriver.Names() {
		t.Run(name, func(t *testing.T) {
			m := simdriver.Start(t, name)
			s := open(t, m)
			snap := snapshot(t, s)
			goldenfile.Compare(t, filepath.Join("testdata", name+".golden"), render(snap))
			checkCapabilities(t, snap)
			if next := snapshot(t, s); !next.Equal(snap) {
				t.Error("the next Snapshot differs", gocmp.Diff(snap, next))
			}
			must(t, s.Close(), s.Close())
			if next := snapshot(t, open(t, m)); !next.Equal(snap) {
				t.Error("the Snapshot of another session differs", gocmp.Diff(snap, next))
			}
		})
	}
}

// engineText lists the engines of an instance by their names in nvidia-smi.
func engineText(s gpu.Slices) string {
	var all []string
	for _, e := range []struct {
		letters string
		n       int
	}{{"CE", s.CopyEngines}, {"DEC", s.Decoders}, {"ENC", s.Encoders}, {"JPEG", s.JPEGDecoders}, {"OFA", s.OFAs}} {
		if e.n > 0 {
			all = append(all, fmt.Sprint(e.n, e.letters))
		}
	}
	return cmp.Or(strings.Join(all, " "), "-")
}

// render formats a snapshot, one line per device. Missing values are "-".
func render(s gpu.Snapshot) string {
	var b strings.Builder
	fmt.Fprintf(&b, "driver %s %s, CUDA %s\n\n", s.Driver.State, s.Driver.Version, s.Driver.CUDA)
	var table strings.Builder
	fmt.Fprintln(&table, "#\tID\tmodel\tprofile\tat\tpci\tnuma\tminor\tcaps\tMiB\tBAR1 MiB\tW\tMHz\tmemory MHz\tPCIe\tcc\tdisplay\tpersistence\tserial\tarchitecture\tbrand\tECC\tNVLinks\taddressing\tslices\tSM\tengines\tmemory slices")
	or := func(v any) string {
		if text := fmt.Sprint(v); !slices.Contains([]string{"", "0", "0 0", "0.0", "0x0", "0/0", "0+0"}, text) {
			return text
		}
		return "-"
	}
	for _, d := range s.Devices {
		at := "whole"
		if d.At.GI != gpu.Whole {
			at = fmt.Sprintf("gi%d/ci%d", d.At.GI, d.At.CI)
		} else if d.MIG {
			at = "whole, MIG"
		}
		fmt.Fprintf(&table, "%d\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			d.Index, d.ID, or(d.Model), or(d.Profile), at, d.PCI, d.NUMANode, d.Minor, or(fmt.Sprintf("%d %d", d.GICap, d.CICap)),
			or(d.Memory>>20), or(d.BAR1>>20), or(d.PowerLimit/1000), or(d.CoreClock), or(d.MemoryClock),
			or(fmt.Sprintf("%dx%d", d.PCIeGen, d.PCIeWidth)), or(d.Compute), or(d.DisplayState), or(d.PersistenceMode),
			or(d.Serial), or(d.Architecture), or(d.Brand), or(d.ECC), or(d.NVLinks), or(d.AddressingMode),
			or(fmt.Sprintf("%d/%d", d.Slices.GPU, d.Slices.Compute)), or(d.Slices.Multiprocessors), engineText(d.Slices),
			or(fmt.Sprintf("%d+%d", d.MemorySlices.First, d.MemorySlices.Count)))
	}
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, err := io.WriteString(w, table.String())
	if err := errors.Join(err, w.Flush()); err != nil {
		return err.Error()
	}
	for _, e := range s.Excluded {
		fmt.Fprintf(&b, "excluded %d %s %s: %s\n", e.Index, e.At, e.PCI, e.Reason)
	}
	index := map[gpu.DeviceID]int{}
	for _, d := range s.Devices {
		if d.At.GI == gpu.Whole {
			index[d.ID] = d.Index
		}
	}
	fmt.Fprintln(&b)
	for _, l := range s.Links {
		fmt.Fprintf(&b, "link %d-%d path %d nvlinks %d", index[l.A], index[l.B], l.Path, l.NVLinks)
		if l.NVLinks > 0 {
			fmt.Fprintf(&b, " generation %d switch %t", l.Generation, l.NVSwitch)
		}
		fmt.Fprintln(&b)
	}
	fmt.Fprintf(&b, "\nnodes %s\n", strings.Join(s.Nodes, " "))
	return b.String()
}

// checkCapabilities: every instance has two capabilities of its own, with device nodes; a GPU has none.
func checkCapabilities(t *testing.T, snap gpu.Snapshot) {
	t.Helper()
	owner := map[int]gpu.DeviceID{}
	for _, d := range snap.Devices {
		if d.At.GI == gpu.Whole {
			if d.GICap != 0 || d.CICap != 0 {
				t.Errorf("a GPU with capabilities: %+v", d)
			}
			continue
		}
		for _, n := range []int{d.GICap, d.CICap} {
			if !slices.Contains(snap.Nodes, fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", n)) || owner[n] != "" {
				t.Errorf("%s has capability %d of %q", d.ID, n, owner[n])
			}
			owner[n] = d.ID
		}
	}
}

func TestUsage(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	for key, value := range map[string]string{
		"power_usage": "301500 mW", "utilization_gpu": "97", "utilization_memory": "41", "encoder": "3", "decoder": "4",
		"temperature": "63 C", "memory_used": "1024 MiB", "bar1_used": "7 MiB", "ecc_l1": "1", "ecc_l2": "2", "ecc_device": "3",
		"ecc_uncorrected_volatile": "4", "clock_sm": "1410 MHz", "clock_memory": "1593 MHz", "pcie_replays": "5",
		"nvlink_tx_kib": "600", "nvlink_rx_kib": "700", "nvlink_crc_errors": "8", "nvlink_replays": "9", "nvlink_recoveries": "10",
	} {
		must(t, m.Set(5, key, value))
	}
	s := open(t, m)
	snapshot(t, s)
	usage, err := s.Usage()
	must(t, err)
	const mib = 1 << 20
	want := gpu.Usage{
		Device: gpu.DeviceID(m.UUID(5)),
		Power:  gpu.OptionalUint64Of(301500), PowerLimit: gpu.OptionalUint64Of(400000), Temperature: gpu.OptionalUint64Of(63),
		GPU: gpu.OptionalUint64Of(97), Memory: gpu.OptionalUint64Of(41), Encoder: gpu.OptionalUint64Of(3), Decoder: gpu.OptionalUint64Of(4),
		// Memory that the driver reserves counts as used.
		MemoryUsed: gpu.OptionalUint64Of((1024 + 615) * mib), MemoryTotal: gpu.OptionalUint64Of(81920 * mib),
		BAR1Used: gpu.OptionalUint64Of(7 * mib), BAR1Total: gpu.OptionalUint64Of(131072 * mib),
		ECCL1: gpu.OptionalUint64Of(1), ECCL2: gpu.OptionalUint64Of(2), ECCMemory: gpu.OptionalUint64Of(3),
		ECCUncorrected: gpu.OptionalUint64Of(4), ClockSM: gpu.OptionalUint64Of(1410), ClockMemory: gpu.OptionalUint64Of(1593),
		PCIeReplays: gpu.OptionalUint64Of(5), NVLinkTransmitted: gpu.OptionalUint64Of(600), NVLinkReceived: gpu.OptionalUint64Of(700),
		NVLinkCRCErrors: gpu.OptionalUint64Of(8), NVLinkReplays: gpu.OptionalUint64Of(9), NVLinkRecoveries: gpu.OptionalUint64Of(10),
	}
	got := map[gpu.DeviceID]gpu.Usage{}
	for _, u := range usage {
		got[u.Device] = u
	}
	if len(usage) != 20 || len(got) != 20 {
		t.Errorf("%d entries for %d devices, want 20", len(usage), len(got))
	}
	// In MIG mode NVIDIA's driver reports all values except the utilisation; the simulated one may report that too.
	parent := got[want.Device]
	want.At = parent.At
	if !parent.GPU.OK {
		want.GPU, want.Memory, want.Encoder, want.Decoder = gpu.OptionalUint64{}, gpu.OptionalUint64{}, gpu.OptionalUint64{}, gpu.OptionalUint64{}
	}
	if diff := gocmp.Diff(want, parent); diff != "" {
		t.Error(diff)
	}
}

// The PCIe link and the NVLinks are those of the latest health check. A counter that the GPU does not report, or whose reading fails,
// is unset, and the others are not.
func TestUsageOfLinks(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	must(t, m.Set(2, "pcie_tx_bytes", "4294967297"), m.Set(2, "pcie_rx_bytes", "12"), m.Set(2, "pcie_gen", "4"), m.Set(2, "pcie_width", "8"),
		m.Set(2, "links_down", "0x3"), m.Set(2, "ecc_uncorrected_volatile", "none"), m.Set(2, "field.59", "!UNKNOWN"))
	s := open(t, m)
	snapshot(t, s)
	read := func() gpu.Usage {
		t.Helper()
		usage, err := s.Usage()
		must(t, err)
		return usage[2]
	}
	if u := read(); u.PCIeGeneration.OK || u.PCIeWidth.OK || u.NVLinks.OK {
		t.Errorf("before a health check: %+v", u)
	}
	probe(t, s)
	got := read()
	for name, c := range map[string]struct{ got, want gpu.OptionalUint64 }{
		"generation": {got.PCIeGeneration, gpu.OptionalUint64Of(4)}, "width": {got.PCIeWidth, gpu.OptionalUint64Of(8)},
		"links": {got.NVLinks, gpu.OptionalUint64Of(16)}, "transmitted": {got.PCIeTransmitted, gpu.OptionalUint64Of(4294967297)},
		"received": {got.PCIeReceived, gpu.OptionalUint64Of(12)}, "NVLink data": {got.NVLinkTransmitted, gpu.OptionalUint64Of(0)},
		"not reported": {got.ECCUncorrected, gpu.OptionalUint64{}}, "not readable": {got.NVLinkRecoveries, gpu.OptionalUint64{}},
	} {
		if c.got != c.want {
			t.Errorf("%s: %+v, want %+v", name, c.got, c.want)
		}
	}
}

// An instance has memory and BAR1 of its own, and the temperature of its GPU. Other values are unset, not zero.
func TestUsageOfInstances(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	ids, err := m.Instances(5)
	must(t, err, m.SetInstance(ids[0], "used=4096MiB", "bar1_used=12MiB"), m.Set(5, "temperature", "63 C"))
	s := open(t, m)
	snapshot(t, s)
	const mib = 1 << 20
	want := map[gpu.DeviceID]gpu.Usage{
		gpu.DeviceID(ids[0]): {
			Temperature: gpu.OptionalUint64Of(63), MemoryUsed: gpu.OptionalUint64Of(4096 * mib), MemoryTotal: gpu.OptionalUint64Of(40192 * mib),
			BAR1Used: gpu.OptionalUint64Of(12 * mib), BAR1Total: gpu.OptionalUint64Of(65536 * mib),
		},
		gpu.DeviceID(ids[2]): {
			Temperature: gpu.OptionalUint64Of(63), MemoryUsed: gpu.OptionalUint64Of(0), MemoryTotal: gpu.OptionalUint64Of(9728 * mib),
			BAR1Used: gpu.OptionalUint64Of(0), BAR1Total: gpu.OptionalUint64Of(16384 * mib),
		},
	}
	check := func(what string) {
		t.Helper()
		began := time.Now()
		usage, err := s.Usage()
		must(t, err)
		seen := 0
		for _, got := range usage {
			u, ok := want[got.Device]
			if !ok {
				continue
			}
			seen++
			if read := u != (gpu.Usage{}); read != (got.At.After(began) && got.At.Before(time.Now())) {
				t.Errorf("%s: read at %v", what, got.At)
			}
			u.Device, u.At = got.Device, got.At
			if diff := gocmp.Diff(u, got); diff != "" {
				t.Errorf("%s: %s", what, diff)
			}
		}
		if seen != 2 {
			t.Errorf("%s: %d instances", what, seen)
		}
	}
	check("all calls succeed")
	must(t, m.Fail(simdriver.GPU(5), "nvmlDeviceGetMemoryInfo", "UNKNOWN", simdriver.Always),
		m.Fail(simdriver.GPU(5), "nvmlDeviceGetTemperature", "NOT_SUPPORTED", simdriver.Always))
	for id, u := range want {
		u.MemoryUsed, u.MemoryTotal, u.Temperature = gpu.OptionalUint64{}, gpu.OptionalUint64{}, gpu.OptionalUint64{}
		want[id] = u
	}
	check("some calls fail")
	must(t, m.Lose(5))
	want = map[gpu.DeviceID]gpu.Usage{gpu.DeviceID(ids[0]): {}, gpu.DeviceID(ids[2]): {}}
	check("the GPU is lost")
}

// No call is made about an instance that nvml.h excludes.
func TestCallsOfUsage(t *testing.T) {
	m, s := start(t, "a100x16-mig", open)
	snapshot(t, s)
	n := counted(t, m, func() {
		if usage, err := s.Usage(); err != nil || len(usage) != 128 {
			t.Errorf("%d, %v", len(usage), err)
		}
	})
	for call, want := range map[string]uint64{
		"nvmlDeviceGetMemoryInfo": 16 + 112, "nvmlDeviceGetBAR1MemoryInfo": 16 + 112,
		"nvmlDeviceGetPowerUsage": 16, "nvmlDeviceGetTemperature": 16, "nvmlDeviceGetUtilizationRates": 16, "nvmlDeviceGetMemoryErrorCounter": 48,
		"nvmlDeviceGetClockInfo": 32, "nvmlDeviceGetFieldValues": 16,
	} {
		if n[call] != want {
			t.Errorf("%d %s, want %d", n[call], call, want)
		}
	}
}
