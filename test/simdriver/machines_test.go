package simdriver_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The GPUs of a machine can be found in each way. That each value is that of the machine's file is shown by test/hardware/record.
func TestLookups(t *testing.T) {
	for _, machine := range simdriver.Names() {
		t.Run(machine, func(t *testing.T) {
			d := open(t, machine)
			seen := map[string]bool{}
			for i := range of(d.DeviceGetCount()).get(t, "count") {
				dev := d.gpu(i)
				id := of(dev.GetUUID()).get(t, "uuid")
				if seen[id] || !strings.HasPrefix(id, "GPU-") {
					t.Errorf("uuid %q: twice or malformed", id)
				}
				seen[id] = true
				of(d.DeviceGetHandleByUUID(id)).is(t, "handle by uuid", dev)
				pci := of(dev.GetPciInfo()).get(t, "pci")
				of(d.DeviceGetHandleByPciBusId(chars(pci.BusId[:]))).is(t, "handle by pci", dev)
				memory := of(dev.GetMemoryInfo()).get(t, "memory")
				v2 := of(dev.GetMemoryInfo_v2()).get(t, "memory v2")
				same(t, "free memory", v2.Free, memory.Free)
				same(t, "memory v2", v2.Reserved+v2.Used+v2.Free, v2.Total)
			}
		})
	}
}

func chars(c []int8) string {
	var b strings.Builder
	for _, x := range c {
		if x == 0 {
			break
		}
		b.WriteByte(byte(x))
	}
	return b.String()
}

func countLinks(dev nvml.Device) int {
	n := 0
	for link := range nvml.NVLINK_MAX_LINKS {
		if state, ret := dev.GetNvLinkState(link); ret == nvml.SUCCESS && state == nvml.FEATURE_ENABLED {
			n++
		}
	}
	return n
}

// Of the values that test/hardware/record does not read.
func TestValuesOfH100(t *testing.T) {
	d := open(t, "h100x8")
	dev := d.gpu(4)
	of(dev.GetEnforcedPowerLimit()).is(t, "enforced limit, mW", 700000)
	pci := of(dev.GetPciInfo()).get(t, "pci")
	same(t, "pci", chars(pci.BusId[:]), "00000000:9D:00.0")
	same(t, "legacy pci", chars(pci.BusIdLegacy[:]), "0000:9D:00.0")
	of(dev.GetP2PStatus(d.gpu(0), nvml.P2P_CAPS_INDEX_NVLINK)).is(t, "p2p", nvml.P2P_STATUS_OK)
}

func TestFieldValues(t *testing.T) {
	d := open(t, "h100x8")
	values := []nvml.FieldValue{
		{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}, {FieldId: nvml.FI_DEV_REMAPPED_PENDING},
		{FieldId: nvml.FI_DEV_NVLINK_GET_STATE, ScopeId: 3}, {FieldId: nvml.FI_DEV_C2C_LINK_COUNT}, {FieldId: 63},
	}
	ok(t, d.m.Set(2, "recovery_action", "4"))
	ok(t, d.m.Set(2, "links_down", "0x8"))
	ok(t, d.m.Set(2, "field.63", "!NO_PERMISSION"))
	want(t, "field values", d.gpu(2).GetFieldValues(values), nvml.SUCCESS)
	same(t, "recovery action", values[0].Value[0], 4)
	same(t, "type of the recovery action", values[0].ValueType, uint32(nvml.VALUE_TYPE_UNSIGNED_INT))
	same(t, "remap pending", values[1].Value[0], 0)
	same(t, "link 3", values[2].Value[0], 0)
	same(t, "links", countLinks(d.gpu(2)), 17)
	same(t, "a field without a value", nvml.Return(values[3].NvmlReturn), nvml.ERROR_NOT_SUPPORTED)
	same(t, "a field that fails", nvml.Return(values[4].NvmlReturn), nvml.ERROR_NO_PERMISSION)
}

func TestTreesOfAMachine(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join(m.Root, path))
		if err != nil {
			return "absent"
		}
		return strings.TrimSpace(string(text))
	}
	same(t, "numa", read("sys/bus/pci/devices/0000:87:00.0/numa_node"), "7")
	link, _ := os.Readlink(filepath.Join(m.Root, "sys/bus/pci/devices/0000:87:00.0"))
	same(t, "place on the PCI bus", link, "../../../devices/pci0000:80/0000:87:00.0")
	same(t, "vendor", read("sys/bus/pci/devices/0000:87:00.0/vendor"), "0x10de")
	// Slot 4 has minor 6 and instances gi 7..13: 3 + (6*15+7)*9 = 876.
	access := "proc/driver/nvidia/capabilities/gpu6/mig/gi7/access"
	same(t, "capability", read(access), "DeviceFileMinor: 876\nDeviceFileMode: 292\nDeviceFileModify: 1")
	if table := read("proc/driver/nvidia-caps/mig-minors"); !strings.Contains(table, "gpu6/gi7/access 876\ngpu6/gi7/ci0/access 877\n") {
		t.Error("mig-minors does not list gpu6/gi7")
	}
	node := filepath.Join(m.Root, "dev/nvidia-caps/nvidia-cap876")
	if info, err := os.Stat(node); err != nil {
		t.Error(err)
	} else if os.Geteuid() == 0 && info.Mode()&os.ModeCharDevice == 0 {
		t.Logf("%s is a plain file: mknod is refused here", node)
	}
	ok(t, m.MIGOff(4))
	same(t, "capability after MIG is off", read(access), "absent")
	ok(t, m.Remove(5))
	same(t, "numa of a removed GPU", read("sys/bus/pci/devices/0000:90:00.0/numa_node"), "absent")
	if _, err := os.Lstat(filepath.Join(m.Root, "sys/bus/pci/devices/0000:90:00.0")); err == nil {
		t.Error("a removed GPU is still on the PCI bus")
	}
	ok(t, m.Unload())
	same(t, "driver version while unloaded", read("sys/module/nvidia/version"), "absent")
	same(t, "sysfs while unloaded", read("sys/bus/pci/devices/0000:87:00.0/numa_node"), "7")
	ok(t, m.Load())
	same(t, "driver version", read("sys/module/nvidia/version"), "535.230.02")
}

func TestMachineFileErrorsNameTheLine(t *testing.T) {
	for _, tt := range []struct{ text, problem string }{
		{"[machine]\ndriver = 1\n[gpu 0]\ncolour = x\n", `machine.conf:4: unknown key "colour"`},
		{"[machine]\ndriver = 1\n[gpu 0]\nmemory = lots\n", `machine.conf:4: memory: cannot read "lots"`},
		{"[machine]\ndriver = 1\n[gpu 0]\nname = x\nuuid = u\n", `[gpu 0]: name, uuid and pci are needed`},
		{"[machine]\n[cpu]\n", `machine.conf:2: unknown section [cpu]`},
		{"[machine]\ndriver = 1\nmemacct = dmem2\n", `memacct: want none, misc or dmem, not "dmem2"`},
		{"[machine]\ndriver = 1\ncgroup_mount = cgroup\n", `machine.conf:3: cgroup_mount: want an absolute path`},
		{"[machine]\ndriver = 1\nlimited_total = v3\n", `limited_total: want v1 or v2, not "v3"`},
		{"driver = 1\n", `machine.conf:1: "driver" before any section`},
		{"[machine]\ndriver = 1\n[gpu 0]\ninstance = 9g gi=1 uuid=x\n", `machine.conf:4: no [profile 9g] above this line`},
	} {
		m := simdriver.StartText(t, "[machine]\ndriver = 1\n")
		ok(t, os.WriteFile(filepath.Join(m.Root, "machine.conf"), []byte(tt.text), 0o644))
		out, code := scene(t, m, "init")
		same(t, tt.text, code, int(nvml.ERROR_UNKNOWN)&0xff)
		if !strings.Contains(out, tt.problem) {
			t.Errorf("%q: %q, want %q", tt.text, out, tt.problem)
		}
	}
}

// A machine file that is broken while agents run changes nothing for them.
func TestMachineFileBrokenLater(t *testing.T) {
	d := open(t, "h200")
	file := filepath.Join(d.m.Root, "machine.conf")
	whole, err := os.ReadFile(file)
	ok(t, err)
	ok(t, os.WriteFile(file, append(whole, "[gpu zero]\n"...), 0o644))
	of(d.gpu(0).GetTemperature(nvml.TEMPERATURE_GPU)).is(t, "temperature", 31)
	if all := violations(t, d.m); len(all) != 1 || !strings.Contains(all[0], "[gpu zero]: want a number") {
		t.Errorf("violations %q", all)
	}
	ok(t, os.WriteFile(file, []byte(strings.Replace(string(whole), "temperature = 31 C", "temperature = 32 C", 1)), 0o644))
	of(d.gpu(0).GetTemperature(nvml.TEMPERATURE_GPU)).is(t, "temperature", 32)
}

func TestFirstGPUOfAMachine(t *testing.T) {
	d := open(t, "none")
	if err := d.m.Add(0); err == nil {
		t.Error("a GPU without a name was added")
	}
	ok(t, d.m.Add(0, "name = NVIDIA A10", "memory = 23028 MiB"))
	of(d.DeviceGetCount()).is(t, "count", 1)
	same(t, "memory", of(d.gpu(0).GetMemoryInfo()).get(t, "memory").Total>>20, 23028)
}
