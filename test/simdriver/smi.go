package simdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Calls of nvidia-smi for Fail, Hang and Slow, beside those of NVML. Fail's times has no effect: each call is a process of its own.
const (
	SMIReset       = "nvidia-smi-reset"
	SMIPersistence = "nvidia-smi-persistence" // sets the persistence mode
	SMIQuery       = "nvidia-smi-query"       // of the persistence mode
)

// smiCommand is the package of the program.
const smiCommand = "github.com/tandem-gpu/tandem/test/simdriver/cmd/nvidia-smi"

// InstallSMI builds nvidia-smi for this machine at a path; "" = where the driver has it below Root. Elsewhere a file beside it, with the suffix .machine, has
// the folder of the machine, so that the program finds it in any environment.
func (m *Machine) InstallSMI(ctx context.Context, path string) error {
	own := path == ""
	if own {
		path = m.path("usr/bin/nvidia-smi")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
	}
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", path, smiCommand)
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build nvidia-smi: %w\n%s", err, out)
	}
	if own { // also in a container, where Root has another path
		return nil
	}
	return os.WriteFile(path+machineSuffix, []byte(m.Root+"\n"), 0o644)
}

const machineSuffix = ".machine"

// OfProgram is the machine of a program such as nvidia-smi: by SIMDRIVER_MACHINE, by a file beside the program, or as the library finds it.
func OfProgram(program string) (*Machine, error) {
	if root := os.Getenv("SIMDRIVER_MACHINE"); root != "" {
		return Open(root)
	}
	if text, err := os.ReadFile(program + machineSuffix); err == nil {
		return Open(strings.TrimSpace(string(text)))
	}
	for dir := filepath.Dir(program); ; dir = filepath.Dir(dir) {
		if m, err := Open(dir); err == nil || dir == "/" {
			return m, err
		}
	}
}

// smiRefusal is a text of nvidia-smi and its exit status.
type smiRefusal struct {
	text   string
	status int
}

func (e *smiRefusal) Error() string { return e.text }

// SMI does what nvidia-smi does with these arguments, and returns its exit status. It knows those with which GPUs are reset.
func (m *Machine) SMI(ctx context.Context, args []string, out io.Writer) int {
	text, err := m.smi(ctx, args)
	if refusal := (*smiRefusal)(nil); errors.As(err, &refusal) {
		_, _ = io.WriteString(out, refusal.text)
		return refusal.status
	}
	if err != nil {
		_, _ = fmt.Fprintf(out, "simulated nvidia-smi: %v\n", err)
		return 99
	}
	_, _ = io.WriteString(out, text)
	return 0
}

var errUsage = &smiRefusal{"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n", 2}

func (m *Machine) smi(ctx context.Context, args []string) (string, error) {
	var ids []string
	if i := slices.Index(args, "-i"); i >= 0 {
		if i+1 == len(args) {
			return "", errUsage
		}
		ids = strings.Split(args[i+1], ",")
		args = slices.Delete(slices.Clone(args), i, i+2)
	}
	slots, err := m.smiSlots(ids)
	if err != nil {
		return "", err
	}
	each := func(what string, do func(slot int) (string, error)) (all string, err error) {
		for _, slot := range slots {
			if err := m.smiFault(ctx, slot, what); err != nil {
				return "", err
			}
			text, err := do(slot)
			if err != nil {
				return "", err
			}
			all += text
		}
		return all, nil
	}
	switch words := strings.Join(args, " "); words {
	case "--query-gpu=persistence_mode --format=csv,noheader":
		return each(SMIQuery, m.smiPersistence)
	case "-pm 0", "-pm 1":
		text, err := each(SMIPersistence, func(slot int) (string, error) { return m.smiSetPersistence(slot, words == "-pm 1") })
		return text + "All done.\n", err
	case "--gpu-reset", "-r":
		text, err := each(SMIReset, func(slot int) (string, error) { return m.smiReset(slot, slots) })
		return text + "All done.\n", err
	}
	return "", errUsage
}

// smiSlots are the GPUs that -i names, by UUID, index or PCI address; all of them without it.
func (m *Machine) smiSlots(ids []string) (slots []int, err error) {
	loaded := true
	if err := m.read(func(c *conf) {
		if v, _ := c.get("machine", "loaded"); v == "no" {
			loaded = false
		}
		for i, slot := range c.slots() {
			named := func(id string) bool {
				return id == c.gpuGet(slot, "uuid") || id == strconv.Itoa(i) || strings.EqualFold(id, "0000"+c.gpuGet(slot, "pci")) || id == c.gpuGet(slot, "pci")
			}
			if ids == nil || slices.ContainsFunc(ids, named) {
				slots = append(slots, slot)
			}
		}
	}); err != nil {
		return nil, err
	}
	switch {
	case !loaded:
		return nil, &smiRefusal{"NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running.\n\n", 9}
	case len(slots) < max(1, len(ids)):
		return nil, &smiRefusal{"No devices were found\n", 6}
	}
	for _, slot := range slots {
		if lost, err := m.Get(slot, "lost"); err != nil || lost == "yes" {
			return nil, errors.Join(err, m.smiLost(slot))
		}
	}
	return slots, nil
}

func (m *Machine) smiLost(slot int) error {
	pci, _ := m.Get(slot, "pci") // the machine was read before
	index := 0
	if slots, err := m.Slots(); err == nil {
		index = slices.Index(slots, slot)
	}
	return &smiRefusal{fmt.Sprintf("Unable to determine the device handle for GPU%d: %s: GPU is lost.  Reboot the system to recover this GPU\n", index, strings.ToUpper(pci)), 15}
}

// smiName is a GPU as nvidia-smi names it: "GPU 00000000:1B:00.0".
func (m *Machine) smiName(slot int) string {
	pci, _ := m.Get(slot, "pci") // the machine was read before
	return "GPU 0000" + strings.ToUpper(pci)
}

func (m *Machine) smiPersistence(slot int) (string, error) {
	v, err := m.Get(slot, "persistence")
	text := map[string]string{"yes": "Enabled", "no": "Disabled"}[v]
	if text == "" {
		text = "[N/A]"
	}
	return text + "\n", err
}

func (m *Machine) smiSetPersistence(slot int, on bool) (string, error) {
	name := m.smiName(slot)
	if os.Geteuid() != 0 {
		return "", &smiRefusal{"Unable to set persistence mode for " + name + ": Insufficient Permissions\n", 4}
	}
	now, err := m.Get(slot, "persistence")
	to, text := "no", "Disabled"
	if on {
		to, text = "yes", "Enabled"
	}
	switch {
	case err != nil:
		return "", err
	case now == "" || now == "none":
		return "", &smiRefusal{"Unable to set persistence mode for " + name + ": Not Supported\n", 3}
	case now == to:
		return "Persistence mode is already " + text + " for " + name + ".\n", nil
	}
	return text + " persistence mode for " + name + ".\n", m.Set(slot, "persistence", to)
}

// smiReset resets a GPU, with all others of the call, or refuses it.
func (m *Machine) smiReset(slot int, with []int) (string, error) {
	if os.Geteuid() != 0 {
		return "", m.smiCode(slot, SMIReset, "NO_PERMISSION")
	}
	var primary, guest, keeps bool
	if err := m.read(func(c *conf) {
		virtualization := c.gpuGet(slot, "virtualization")
		primary, keeps = c.gpuGet(slot, "display_active") == "yes", c.gpuGet(slot, "reset_keeps_fault") == "yes"
		guest = virtualization == "passthrough" || virtualization == "vgpu"
	}); err != nil {
		return "", err
	}
	switch linked, err := m.smiLinked(slot, with); {
	case err != nil || linked != nil:
		return "", errors.Join(err, linked)
	case guest:
		return "", m.smiCode(slot, SMIReset, "NOT_SUPPORTED")
	case primary:
		return "", &smiRefusal{"GPU Reset couldn't run because " + m.smiName(slot) + " is the primary GPU.\n", 255}
	}
	if used, err := m.smiInUse(slot); err != nil || used {
		return "", errors.Join(err, m.smiCode(slot, SMIReset, "IN_USE"))
	}
	action, err := m.Get(slot, "recovery_action")
	if err == nil {
		err = m.edit(func(c *conf) error { return c.setAll(gpuHead(slot), "instance", nil) })
	}
	if err == nil {
		err = m.Reset(slot)
	}
	if err == nil && keeps {
		err = m.Set(slot, "recovery_action", action)
	}
	return m.smiName(slot) + " was successfully reset.\n", err
}

// smiInUse reports whether a process has the GPU open, or uses it by what NVML reports. Persistence mode is a use, too.
func (m *Machine) smiInUse(slot int) (used bool, err error) {
	minor := 0
	if err := m.read(func(c *conf) {
		minor = minorOf(c, slot)
		used = c.gpuGet(slot, "persistence") == "yes" || len(c.all(gpuHead(slot), "process")) > 0
	}); err != nil || used {
		return used, err
	}
	pids, err := m.Holders()
	for _, pid := range pids {
		nodes, err := m.HeldBy(pid)
		if err != nil || slices.ContainsFunc(nodes, func(node string) bool {
			return path.Base(strings.TrimSuffix(node, " (deleted)")) == fmt.Sprintf("nvidia%d", minor)
		}) {
			return true, err
		}
	}
	return false, err
}

// smiLinked is the refusal of a GPU that NVLinks connect to one that is not reset by the same call: nvidia-smi(1) has it for GPUs before Ampere, and where
// no Fabric Manager runs, as on machines without NVSwitches. Its wording is not known.
func (m *Machine) smiLinked(slot int, with []int) (refusal, err error) {
	err = m.read(func(c *conf) {
		_, switches := c.get("links", "switches")
		if switches && !slices.Contains([]string{"pascal", "volta"}, c.gpuGet(slot, "arch")) {
			return
		}
		var peers []string
		for _, peer := range c.slots() {
			if peer != slot && !slices.Contains(with, peer) && c.linked(slot, peer) {
				peers = append(peers, "GPU 0000"+strings.ToUpper(c.gpuGet(peer, "pci")))
			}
		}
		if peers != nil {
			refusal = &smiRefusal{fmt.Sprintf("%s has NVLink connections to GPUs that must be reset in the same command: %s\n", m.smiName(slot), strings.Join(peers, ", ")), 255}
		}
	})
	return refusal, err
}

// smiFault does what the faults of the machine set for a call of nvidia-smi.
func (m *Machine) smiFault(ctx context.Context, slot int, call string) error {
	for {
		lines, err := m.Faults()
		if err != nil {
			return err
		}
		hangs := false
		for _, line := range lines {
			words := append(strings.Fields(line), "", "", "")
			target := Target(words[1])
			if is, _ := path.Match(words[2], call); !is || target != All && target != GPU(slot) && string(target) != m.UUID(slot) {
				continue
			}
			switch words[0] {
			case "fail":
				return m.smiCode(slot, call, words[3])
			case "hang":
				hangs = true
			case "slow":
				if d, err := time.ParseDuration(words[3]); err == nil {
					<-time.After(d)
				}
			}
		}
		if !hangs {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// smiCode is what nvidia-smi prints when a step of a call answers with a code of NVML.
func (m *Machine) smiCode(slot int, call, code string) error {
	name := m.smiName(slot)
	text := map[string]string{"NOT_SUPPORTED": "Not Supported", "NO_PERMISSION": "Insufficient Permissions", "RESET_REQUIRED": "GPU requires reset"}[code]
	if text == "" {
		text = "Unknown Error"
	}
	switch {
	case code == "GPU_IS_LOST":
		return m.smiLost(slot)
	case call == SMIQuery:
		return &smiRefusal{"[" + text + "]\n", 0}
	case call == SMIPersistence:
		return &smiRefusal{"Unable to set persistence mode for " + name + ": " + text + "\n", 4}
	case code == "NOT_SUPPORTED":
		return &smiRefusal{"Resetting " + name + " is not supported.\n", 3}
	case code == "NO_PERMISSION":
		return &smiRefusal{"Unable to reset " + name + ": " + text + "\n", 4}
	case code == "IN_USE":
		return &smiRefusal{"The following GPUs could not be reset:\n  " + name + ": In use by another client\n\n" +
			"1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, or a " +
			"monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all compute applications running in the system.\n", 255}
	}
	return &smiRefusal{"The following GPUs could not be reset:\n  " + name + ": " + text + "\n\n", 255}
}

// linked reports whether NVLinks connect two GPUs directly, or over switches.
func (c *conf) linked(a, b int) (linked bool) {
	in := func(set string, slot int) bool {
		from, to, isRange := strings.Cut(set, "-")
		if !isRange {
			to = from
		}
		return set == "all" || number(from) <= uint64(slot) && uint64(slot) <= number(to) //nolint:gosec // slots are not negative
	}
	for _, line := range c.all("links", "nvlink") {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		first, second := words[1], words[len(words)-1]
		if in(first, a) && in(second, b) || in(first, b) && in(second, a) {
			linked = number(words[0]) > 0
		}
	}
	return linked
}
