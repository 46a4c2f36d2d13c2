package simdriver

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Majors as a kernel of these years hands them out; 195 is NVIDIA's own.
const (
	majorGPU  = 195
	majorUVM  = 511
	majorCaps = 508
)

// tree is what lies under a root besides the library: file texts, character
// devices and the targets of symbolic links, by path.
type tree struct {
	files map[string]string
	nodes map[string]device
	links map[string]string
}

type device struct{ major, minor uint32 }

// owned are the files and folders of a tree: other files in them are removed.
var owned = []string{
	"sys/bus/pci/devices", "sys/devices/pci*", "sys/module/nvidia", "proc/driver/nvidia*", "dev/nvidia*",
	libraryDir + "/lib*.so.[0-9]*.[0-9]*", libraryDir + "/vdpau",
}

func treeOf(c *conf) tree {
	t := tree{files: map[string]string{}, nodes: map[string]device{}, links: map[string]string{}}
	driver, _ := c.get("machine", "driver")
	installed, _ := c.get("machine", "library")
	t.libraries(cmp.Or(installed, driver))
	loaded, _ := c.get("machine", "loaded")
	if loaded != "no" {
		t.driver(driver)
	}
	t.files["sys/class/dmi/id/product_name"] = "Simulated (R) machine\n"
	boots, _ := c.get("machine", "boots")
	t.files["proc/sys/kernel/random/boot_id"] = fmt.Sprintf("5eed0000-0000-4000-8000-%012d\n", number(boots))
	top := 0
	for i, slot := range c.slots() {
		minor := minorOf(c, slot)
		top = max(top, minor+1)
		t.pci(c, slot)
		if loaded == "no" {
			continue
		}
		t.gpu(c, slot, i, minor, driver)
	}
	if loaded != "no" {
		t.minors(top)
	}
	return t
}

// minorOf is the minor number of a GPU's device node.
func minorOf(c *conf, slot int) int {
	if n, err := strconv.Atoi(c.gpuGet(slot, "minor")); err == nil {
		return n
	}
	return slot
}

func (t tree) driver(version string) {
	t.files["proc/driver/nvidia/version"] = fmt.Sprintf(
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  %s  Release Build  (simulated)\nGCC version:  gcc version 12.2.0\n", version)
	t.files["proc/driver/nvidia/params"] = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\n"
	t.files["sys/module/nvidia/version"] = version + "\n"
	t.files["proc/devices"] = fmt.Sprintf("Character devices:\n%3d nvidia\n%3d nvidia-caps\n%3d nvidia-uvm\n%3d nvidiactl\n\nBlock devices:\n",
		majorGPU, majorCaps, majorUVM, majorGPU)
	t.nodes["dev/nvidiactl"] = device{majorGPU, 255}
	t.nodes["dev/nvidia-modeset"] = device{majorGPU, 254}
	t.nodes["dev/nvidia-uvm"] = device{majorUVM, 0}
	t.nodes["dev/nvidia-uvm-tools"] = device{majorUVM, 1}
	t.cap("mig/config", 1)
	t.cap("mig/monitor", 2)
}

// pci is the GPU as the kernel's PCI layer shows it, driver or not.
func (t tree) pci(c *conf, slot int) {
	address := c.gpuGet(slot, "pci")
	place := pciRoot(address) + "/" + address
	t.links["sys/bus/pci/devices/"+address] = "../../../devices/" + place
	dir := "sys/devices/" + place + "/"
	numa := c.gpuGet(slot, "numa")
	if numa == "" || numa == "none" {
		numa = "-1"
	}
	class := "0x030200"
	if c.gpuGet(slot, "display_active") == "yes" {
		class = "0x030000"
	}
	id := number(c.gpuGet(slot, "pci_device"))
	sub := number(c.gpuGet(slot, "pci_subsystem"))
	t.files[dir+"numa_node"] = numa + "\n"
	t.files[dir+"class"] = class + "\n"
	t.files[dir+"vendor"] = fmt.Sprintf("0x%04x\n", id&0xffff)
	t.files[dir+"device"] = fmt.Sprintf("0x%04x\n", id>>16)
	t.files[dir+"subsystem_vendor"] = fmt.Sprintf("0x%04x\n", sub&0xffff)
	t.files[dir+"subsystem_device"] = fmt.Sprintf("0x%04x\n", sub>>16)
	t.files[dir+"resource"] = strings.Repeat("0x0000000000000000 0x0000000000000000 0x0000000000000000\n", 13)
	config := make([]byte, 256) // PCI configuration space: IDs, class, no capabilities
	binary.LittleEndian.PutUint32(config, uint32(id))
	binary.LittleEndian.PutUint32(config[0x2c:], uint32(sub))
	config[0xb], config[0xa] = 3, class[5]-'0'
	t.files[dir+"config"] = string(config)
}

// pciRoot is the PCIe root complex of a function: buses with the same first digit are on one, about as in a DGX A100.
func pciRoot(address string) string {
	domain, rest, _ := strings.Cut(address, ":")
	return "pci" + domain + ":" + rest[:1] + "0"
}

// gpu is the GPU as the NVIDIA driver shows it.
func (t tree) gpu(c *conf, slot, index, minor int, driver string) {
	pci := c.gpuGet(slot, "pci")
	t.nodes[fmt.Sprintf("dev/nvidia%d", minor)] = device{majorGPU, uint32(minor)}
	t.files[listedGPUs+pci+"/information"] = fmt.Sprintf(
		"Model: \t\t %s\nIRQ:   \t\t %d\nGPU UUID: \t %s\nVideo BIOS: \t %s\nBus Type: \t PCIe\nBus Location: \t %s\nDevice Minor: \t %d\nGPU Firmware: \t %s\nGPU Excluded:\t No\n",
		c.gpuGet(slot, "name"), 100+index, c.gpuGet(slot, "uuid"), c.gpuGet(slot, "vbios"), pci, minor, driver)
	if c.gpuGet(slot, "mig") != "yes" {
		return
	}
	for _, line := range c.all(gpuHead(slot), "instance") {
		gi, ci := instanceIDs(line)
		at := fmt.Sprintf("gpu%d/mig/gi%d/", minor, gi)
		t.cap(at+"access", capMinor(minor, gi, -1))
		t.cap(at+fmt.Sprintf("ci%d/access", ci), capMinor(minor, gi, ci))
	}
}

// cap is one capability: its description under /proc and its device node.
func (t tree) cap(path string, minor int) {
	t.files["proc/driver/nvidia/capabilities/"+path] = fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor)
	t.nodes[fmt.Sprintf("dev/nvidia-caps/nvidia-cap%d", minor)] = device{majorCaps, uint32(minor)}
}

// minors is the table of every capability that could exist, as the driver prints it.
func (t tree) minors(gpus int) {
	var b strings.Builder
	b.WriteString("config 1\nmonitor 2\n")
	for g := range gpus {
		for gi := range capGIs {
			fmt.Fprintf(&b, "gpu%d/gi%d/access %d\n", g, gi, capMinor(g, gi, -1))
			for ci := range capCIs {
				fmt.Fprintf(&b, "gpu%d/gi%d/ci%d/access %d\n", g, gi, ci, capMinor(g, gi, ci))
			}
		}
	}
	t.files["proc/driver/nvidia-caps/mig-minors"] = b.String()
}

// The driver numbers capabilities GPU by GPU: 15 GPU instances of 8 compute instances each.
const capGIs, capCIs = 15, 8

func capMinor(gpu, gi, ci int) int { return 3 + (gpu*capGIs+gi)*(capCIs+1) + ci + 1 }

func instanceIDs(line string) (gi, ci int) {
	for _, word := range strings.Fields(line) {
		if v, ok := strings.CutPrefix(word, "gi="); ok {
			gi, _ = strconv.Atoi(v)
		}
		if v, ok := strings.CutPrefix(word, "ci="); ok {
			ci, _ = strconv.Atoi(v)
		}
	}
	return gi, ci
}

func number(s string) uint64 {
	n, _ := strconv.ParseUint(s, 0, 64)
	return n
}

// listedGPUs is the folder in which the kernel module lists its GPUs.
const listedGPUs = "proc/driver/nvidia/gpus/"

func isListed(path string) bool { return strings.HasPrefix(path, listedGPUs) }

// write writes all but the list of GPUs.
func (t tree) write(root string) error {
	if err := t.writeFiles(root, func(path string) bool { return !isListed(path) }); err != nil {
		return err
	}
	for path, target := range t.links {
		if err := link(target, filepath.Join(root, path)); err != nil {
			return err
		}
	}
	for path, d := range t.nodes {
		if err := d.make(filepath.Join(root, path)); err != nil {
			return err
		}
	}
	return nil
}

// writeFiles writes the files of which is holds.
func (t tree) writeFiles(root string, is func(path string) bool) error {
	for path, text := range t.files {
		if !is(path) {
			continue
		}
		at := filepath.Join(root, path)
		if old, err := os.ReadFile(at); err == nil && string(old) == text {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			return err
		}
		if err := replace(at, text); err != nil {
			return err
		}
	}
	return nil
}

// link makes a symbolic link, unless it is there.
func link(target, path string) error {
	if old, err := os.Readlink(path); err == nil && old == target {
		return nil
	}
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.RemoveAll(path)); err != nil {
		return err
	}
	return os.Symlink(target, path)
}

// make puts a character device at path, or a plain file where mknod is not allowed.
func (d device) make(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	number := int(d.major&0xfff<<8 | d.minor&0xff | d.minor&^0xff<<12)
	err := syscall.Mknod(path, syscall.S_IFCHR|0o666, number)
	if errors.Is(err, fs.ErrPermission) {
		return os.WriteFile(path, nil, 0o666)
	}
	if err != nil {
		return fmt.Errorf("mknod %s: %w", path, err)
	}
	return os.Chmod(path, 0o666) // whatever the umask is
}

// prune removes the files of an earlier machine that this one has not, and the folders that are empty then.
func (t tree) prune(root string) error {
	var folders []string
	visit := func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() {
			folders = append(folders, at)
			return nil
		}
		path, err := filepath.Rel(root, at)
		_, isFile := t.files[path]
		_, isNode := t.nodes[path]
		_, isLink := t.links[path]
		if err != nil || isFile || isNode || isLink {
			return err
		}
		return os.Remove(at)
	}
	for _, pattern := range owned {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return err
		}
		for _, at := range found {
			if err := filepath.WalkDir(at, visit); err != nil {
				return err
			}
		}
	}
	for _, at := range slices.Backward(folders) {
		_ = os.Remove(at) // fails unless it is empty
	}
	return nil
}
