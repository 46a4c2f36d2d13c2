package doctor_test

import (
	"cmp"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// machine is a node on which one thing is wrong.
type machine struct {
	name    string
	program string
	machine string // of the simulated driver; "" = h100x8
	healthy bool
	effect  bool // another finding is about what follows for the devices
	breaks  func(h *host)
}

func (m machine) on() string { return cmp.Or(m.machine, "h100x8") }

const k8s, nomad = "k8s-gpu", "nomad-gpu"

func nothing(*host) {}

// noModule is a node whose kernel module is not loaded.
func noModule(h *host) { h.must(h.Unload()) }

var machines = []machine{
	{name: "healthy, Kubernetes", program: k8s, healthy: true, breaks: nothing},
	{name: "healthy, Nomad", program: nomad, healthy: true, breaks: nothing},
	{name: "healthy, MIG", program: nomad, machine: "a30", healthy: true, breaks: nothing},

	{name: "no GPU on the bus", program: k8s, machine: "none", breaks: func(h *host) { h.write("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100\n") }},
	{name: "no GPU on the bus, Nomad", program: nomad, machine: "none", breaks: func(h *host) { h.write("sys/bus/pci/devices/0000:00:1f.0/class", "0x060100\n") }},
	{name: "every GPU passed to virtual machines", program: nomad, machine: "t4", breaks: func(h *host) {
		noModule(h)
		slots, err := h.Slots()
		h.must(err)
		for _, slot := range slots {
			h.link(h.slotPCI(slot)+"/driver", "../../../drivers/vfio-pci")
		}
	}},
	{name: "no driver installed", program: k8s, breaks: func(h *host) { noModule(h); h.remove(library) }},
	{name: "library missing, module loaded", program: nomad, breaks: func(h *host) { h.remove(library) }},
	{name: "library in another root", program: k8s, breaks: func(h *host) {
		text, err := os.ReadFile(filepath.Join(h.Root, library))
		h.must(err)
		h.write("run/nvidia/driver/"+library, string(text))
		h.remove(library)
	}},
	{name: "library link dangles", program: nomad, breaks: func(h *host) { h.link(library, "libnvidia-ml.so.999.99") }},
	{name: "library is empty", program: k8s, breaks: func(h *host) { h.write(library, "") }},
	{name: "library of another architecture", program: k8s, breaks: func(h *host) {
		text, err := os.ReadFile(filepath.Join(h.Root, library))
		h.must(err)
		text[18] = 183 // e_machine: EM_AARCH64
		h.write(library, string(text))
	}},
	{name: "a library that it needs is missing", program: nomad, breaks: func(h *host) {
		text, err := os.ReadFile(filepath.Join(h.Root, library))
		h.must(err)
		h.write(library, strings.ReplaceAll(string(text), "libc.so.6\x00", "libq.so.6\x00"))
	}},

	{name: "module not loaded", program: nomad, breaks: noModule},
	{name: "module blacklisted", program: k8s, breaks: func(h *host) {
		noModule(h)
		h.write("etc/modprobe.d/gpu.conf", "# for passthrough\nblacklist nvidia\n")
	}},
	{name: "module not built after a kernel upgrade", program: k8s, breaks: func(h *host) {
		noModule(h)
		h.write("lib/modules/6.8.0-45-generic/modules.dep", "kernel/fs/ext4/ext4.ko.zst:\n")
		h.write("lib/modules/6.8.0-40-generic/modules.dep", "updates/dkms/nvidia.ko.zst:\nupdates/dkms/nvidia-uvm.ko.zst: updates/dkms/nvidia.ko.zst\n")
	}},
	{name: "Secure Boot refuses the module", program: k8s, breaks: func(h *host) {
		noModule(h)
		h.write("sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c", "\x06\x00\x00\x00\x01")
		h.write("kmsg", "3,700,5000,-;Loading of module with unavailable key is rejected\n")
	}},
	{name: "nouveau in place of nvidia", program: nomad, breaks: func(h *host) {
		noModule(h)
		h.write("sys/module/nouveau/refcnt", "0\n")
	}},
	{name: "module of an older version", program: k8s, breaks: func(h *host) { h.must(h.SetModule("535.183.01")) }},

	{name: "control node missing, library fails", program: k8s, breaks: func(h *host) {
		h.remove("dev/nvidiactl")
		h.must(h.Fail(simdriver.All, "nvmlInit", "DRIVER_NOT_LOADED", simdriver.Always))
	}},
	{name: "nvidia-uvm missing, containers get nodes", program: nomad, breaks: func(h *host) { h.remove("dev/nvidia-uvm") }},
	{name: "nvidia-uvm of an earlier load", program: nomad, breaks: func(h *host) {
		h.remove("dev/nvidia-uvm")
		h.must(syscall.Mknod(filepath.Join(h.Root, "dev/nvidia-uvm"), syscall.S_IFCHR|0o666, 509<<8))
	}},
	{name: "a node is a file", program: k8s, breaks: func(h *host) { h.write("dev/nvidia3", "") }},
	{name: "MIG capability nodes missing", program: nomad, machine: "a30", breaks: func(h *host) { h.remove("dev/nvidia-caps") }},

	{name: "driver fails", program: k8s, breaks: func(h *host) {
		h.must(h.Fail(simdriver.All, "nvmlInit", "UNKNOWN", simdriver.Always))
		h.write("kmsg", "3,900,7000,-;NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x62:0x65:1860)\n")
	}},
	{name: "driver hangs", program: nomad, breaks: func(h *host) { h.must(h.Hang(simdriver.All, "nvmlInit")) }},
	{name: "one GPU hangs", program: k8s, breaks: func(h *host) { h.must(h.Hang(simdriver.GPU(3), "nvmlDeviceGetUUID")) }},
	{name: "one GPU lost", program: nomad, breaks: func(h *host) { h.must(h.Lose(3)) }},
	{name: "one GPU off the bus", program: k8s, breaks: func(h *host) {
		dir := h.slotPCI(3)
		h.must(h.Remove(3))
		h.gpuOnBus(dir)
		h.write(dir+"/config", "\xff\xff\xff\xff\xff\xff\xff\xff")
		h.write("kmsg", "3,900,7000,-;NVRM: Xid (PCI:0000:61:00): 79, pid=1234, name=python, GPU has fallen off the bus.\n")
	}},
	{name: "one GPU bound to nouveau", program: k8s, breaks: func(h *host) {
		dir := h.slotPCI(3)
		h.must(h.Remove(3))
		h.gpuOnBus(dir)
		h.link(dir+"/driver", "../../../drivers/nouveau")
	}},
	{name: "one GPU without a driver", program: nomad, breaks: func(h *host) {
		dir := h.slotPCI(3)
		h.must(h.Remove(3))
		h.gpuOnBus(dir)
	}},
	{name: "one GPU excluded by the module", program: nomad, breaks: func(h *host) {
		dir := h.slotPCI(3)
		h.must(h.Remove(3))
		h.gpuOnBus(dir)
		h.write("proc/driver/nvidia/gpus/"+filepath.Base(dir)+"/information", "Model: \t\t NVIDIA H100\nDevice Minor: \t 3\nGPU Excluded:\t Yes\n")
	}},
	{name: "one GPU not initialised", program: k8s, breaks: func(h *host) {
		dir := h.slotPCI(3)
		information, err := os.ReadFile(filepath.Join(h.Root, "proc/driver/nvidia/gpus", filepath.Base(dir), "information"))
		h.must(err)
		h.must(h.Remove(3))
		h.gpuOnBus(dir)
		h.write("proc/driver/nvidia/gpus/"+filepath.Base(dir)+"/information", string(information))
		h.must(syscall.Mknod(filepath.Join(h.Root, "dev/nvidia3"), syscall.S_IFCHR|0o666, 195<<8|3))
		h.write("kmsg", "3,900,7000,-;NVRM: GPU 0000:61:00.0: RmInitAdapter failed! (0x24:0x72:1568)\n")
	}},
	{name: "a GPU needs a reset", program: nomad, breaks: func(h *host) { h.must(h.Set(2, "recovery_action", "1")) }},
	{name: "MIG mode without instances", program: nomad, machine: "a30", breaks: func(h *host) { h.must(h.SetMIG(1)) }},
	{name: "every GPU reserved", program: k8s, breaks: func(h *host) {
		h.policy("version: v1\npolicy:\n  rules:\n  - {select: {model: \"*H100*\"}, use: reserved}\n")
	}},
	{name: "MPS daemon not running", program: nomad, breaks: func(h *host) {
		h.policy("version: v1\nflags: {mpsRoot: " + h.Root + "/mps}\npolicy:\n  rules:\n  - {select: {index: [5, 6]}, use: mps, replicas: 2}\n")
	}},
	{name: "invalid policy", program: k8s, breaks: func(h *host) {
		h.policy("version: v1\npolicy:\n  rules:\n  - {select: {index: 0}, use: quartered}\n")
	}},
	{name: "invalid flag", program: k8s, breaks: func(h *host) { h.args = append(h.args, "--mig-strategy=all") }},

	{name: "toolkit missing", program: k8s, breaks: func(h *host) { h.remove("usr/bin/nvidia-container-runtime") }},
	{name: "toolkit missing, docker on Nomad", program: nomad, breaks: func(h *host) { h.remove("usr/bin/nvidia-container-runtime") }},
	{name: "toolkit refuses the variable", program: k8s, breaks: func(h *host) {
		h.write("etc/nvidia-container-runtime/config.toml", "accept-nvidia-visible-devices-envvar-when-unprivileged = false # multi-tenant\n")
	}},
	{name: "toolkit for rootless containers", program: nomad, breaks: func(h *host) {
		h.write("etc/nvidia-container-runtime/config.toml", "[nvidia-container-cli]\nno-cgroups = true\n")
	}},
	{name: "invalid CDI specification", program: k8s, breaks: func(h *host) { h.write("cdi/nvidia.yaml", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: []\n") }},
	{name: "state directory is a file", program: nomad, breaks: func(h *host) { h.write("state", "") }},
	{name: "history of a damaged disk", program: nomad, effect: true, breaks: func(h *host) { h.write("state/nomad-gpu.json", "{\x00\x00") }},
	{name: "another agent offers the GPUs", program: k8s, breaks: func(h *host) { h.otherAgent() }},
	{name: "nvidia-device-plugin beside Nomad", program: nomad, breaks: func(h *host) { h.process(200, "/usr/bin/nvidia-device-plugin") }},

	{name: "no folder of the kubelet", program: k8s, breaks: func(h *host) {
		h.kubelet.Stop()
		h.remove(filepath.Dir(h.kubelet.Socket()))
	}},
	{name: "kubelet not started", program: k8s, breaks: func(h *host) { h.kubelet.Stop(); h.remove(h.kubelet.Socket()) }},
	{name: "kubelet crashed", program: k8s, breaks: func(h *host) { h.kubelet.Crash() }},
	{name: "pod-resources API not mounted", program: k8s, breaks: func(h *host) { h.args = append(h.args, "--pod-resources-socket=/nowhere/kubelet.sock") }},
	{name: "NVIDIA's plugin runs, too", program: k8s, breaks: func(h *host) { h.listen(filepath.Dir(h.kubelet.Socket()) + "/nvidia-gpu.sock") }},
	{name: "kubelet's checkpoint damaged", program: k8s, breaks: func(h *host) {
		h.must(os.WriteFile(filepath.Dir(h.kubelet.Socket())+"/kubelet_internal_checkpoint", []byte(`{"Data":{"PodDev`), 0o600))
	}},
}

// gpuOnBus adds a GPU to the PCI bus that the driver does not list.
func (h *host) gpuOnBus(dir string) {
	h.write(dir+"/vendor", "0x10de\n")
	h.write(dir+"/class", "0x030200\n")
}

// listen serves a socket that accepts connections until the end of the test.
func (h *host) listen(path string) {
	h.t.Helper()
	l, err := (&net.ListenConfig{}).Listen(h.t.Context(), "unix", path)
	h.must(err)
	h.t.Cleanup(func() { _ = l.Close() })
}
