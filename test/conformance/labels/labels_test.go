package labels

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// difference are labels that k8s-gpu has otherwise on purpose. An empty text means that there is no such label.
type difference struct{ nvidia, own, why string }

// machine is a case: the machine, the configuration file of both programs, and what differs.
type machine struct {
	name, conf, config string
	change             func(t *testing.T, m *simdriver.Machine)
	differs            map[string]difference
}

const (
	single = "version: v1\nflags: {migStrategy: single}\n"
	mixed  = "version: v1\nflags: {migStrategy: mixed}\n"
)

func timeSlicing(flags, resource, more string) string {
	return "version: v1\nflags: {" + flags + "}\nsharing: {timeSlicing: {" + more + "resources: [{name: " + resource + ", replicas: 4}]}}\n"
}

var machines = []machine{
	{name: "H100", conf: "h100x8"},
	{name: "H100, single without MIG", conf: "h100x8", config: single},
	{name: "H100, mixed without MIG", conf: "h100x8", config: mixed},
	{name: "time-slicing", conf: "h100x8", config: timeSlicing("", "nvidia.com/gpu", "")},
	{name: "time-slicing, renamed", conf: "h100x8", config: timeSlicing("", "nvidia.com/gpu", "renameByDefault: true, ")},
	{name: "MPS", conf: "h100x8", config: "version: v1\nflags: {mpsRoot: /run/nvidia/mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n"},
	{name: "MIG, none", conf: "a100-mig"},
	{name: "MIG, single on a mixed machine", conf: "a100-mig", config: single},
	{name: "MIG, mixed", conf: "a100-mig", config: mixed},
	{name: "MIG, mixed, time-slicing of a profile", conf: "a100-mig", config: timeSlicing("migStrategy: mixed", "nvidia.com/mig-1g.10gb", "")},
	{name: "MIG, mixed, time-slicing of full GPUs", conf: "a100-mig", config: timeSlicing("migStrategy: mixed", "nvidia.com/gpu", "")},
	{name: "MIG, single", conf: "a100x16-mig", config: single},
	{name: "MIG, single, time-slicing", conf: "a100x16-mig", config: timeSlicing("migStrategy: single", "nvidia.com/gpu", "")},
	{name: "MIG, single, an empty GPU", conf: "a100x16-mig", config: single, change: func(t *testing.T, m *simdriver.Machine) { check.NoError(t, m.SetMIG(3)) }},
	{name: "MIG on every GPU, none", conf: "a100x16-mig"},
	{name: "MIG with media extensions", conf: "rtxpro6000", config: mixed},
	{name: "A30", conf: "a30", config: mixed},
	{name: "NVLink clique over nodes", conf: "gb200"},
	{name: "B200", conf: "b200", config: mixed},
	{name: "Volta", conf: "dgx1"}, {name: "Turing", conf: "t4"}, {name: "Ada Lovelace", conf: "l40s"}, {name: "GeForce", conf: "consumer"},
	{name: "virtual GPU", conf: "t4", change: virtual},
	{name: "no GPUs", conf: "none"},
}

// virtual makes the GPUs those of a virtual machine: the capability is that of a GRID guest in NVIDIA's tests.
func virtual(t *testing.T, m *simdriver.Machine) {
	config := make([]byte, 256)
	config[0x06], config[0x34] = 0x10, 0xd0
	copy(config[0xd0:], "\x09\x00\x1bVF\x00\x16460.16\x00\x00\x00\x00r460_00\x00\x00\x00\x00")
	paths, err := filepath.Glob(filepath.Join(m.Root, "sys/bus/pci/devices/*/config"))
	check.NoError(t, err)
	for _, path := range paths {
		check.NoError(t, os.WriteFile(path, config, 0o644))
	}
}

// Both programs write the same labels, but for the differences that are listed.
func TestLabels(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("NVIDIA's program reads /sys, over which only root can mount that of the simulated machine")
	}
	nvidia, own := build(t)
	for _, c := range machines {
		t.Run(c.name, func(t *testing.T) {
			m, err := simdriver.Install(t.Context(), t.TempDir(), c.conf)
			check.NoError(t, err)
			if c.change != nil {
				c.change(t, m)
			}
			config := filepath.Join(m.Root, "config.yaml")
			check.NoError(t, os.WriteFile(config, []byte(cmp.Or(c.config, "version: v1\n")), 0o644))
			want, got := discovery(t, nvidia, m, config), ownLabels(t, own, m, config)
			all := maps.Clone(want)
			maps.Copy(all, got)
			for _, name := range slices.Sorted(maps.Keys(all)) {
				d, known := c.differs[name]
				_, theirs := want[name]
				_, ours := got[name]
				switch {
				case want[name] == got[name] && theirs == ours && !known:
				case known && want[name] == d.nvidia && got[name] == d.own:
				default:
					t.Errorf("%s: NVIDIA %q (%v), own %q (%v)", name, want[name], theirs, got[name], ours)
				}
			}
			if c.conf != "none" && len(c.differs) == 0 && len(got) < 15 {
				t.Errorf("only %d labels", len(got))
			}
		})
	}
}

// build builds both programs.
func build(t *testing.T) (nvidia, own string) {
	t.Helper()
	dir := t.TempDir()
	nvidia, own = filepath.Join(dir, "gpu-feature-discovery"), filepath.Join(dir, "k8s-gpu")
	for _, args := range [][]string{
		{"build", "-o", nvidia, "github.com/NVIDIA/k8s-device-plugin/cmd/gpu-feature-discovery"},
		{"-C", "../../..", "build", "-o", own, "./cmd/k8s-gpu"},
	} {
		c := exec.CommandContext(t.Context(), "go", args...)
		c.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_CFLAGS=-Wno-deprecated-declarations")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return nvidia, own
}

// discovery runs NVIDIA's program once. It takes no root for sysfs, so that of the machine is mounted in a namespace of its own.
func discovery(t *testing.T, program string, m *simdriver.Machine, config string) map[string]string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "gfd")
	sys := filepath.Join(m.Root, "sys")
	check.NoError(t, os.MkdirAll(filepath.Join(sys, "bus/pci/devices"), 0o755))
	check.NoError(t, os.MkdirAll(filepath.Join(sys, "devices"), 0o755)) // to which the links of the other folder point
	c := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec",
		fmt.Sprintf("mount --bind %q /sys/bus/pci/devices; mount --bind %q /sys/devices; exec %q",
			filepath.Join(sys, "bus/pci/devices"), filepath.Join(sys, "devices"), program))
	c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(m.Library), "GFD_USE_NODE_FEATURE_API=false", "GFD_ONESHOT=true",
		"GFD_OUTPUT_FILE="+file, "GFD_MACHINE_TYPE_FILE="+filepath.Join(sys, "class/dmi/id/product_name"),
		"GFD_CONFIG_FILE="+config, "DEVICE_DISCOVERY_STRATEGY=nvml")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("gpu-feature-discovery: %v\n%s", err, out)
	}
	return read(t, file)
}

// ownLabels runs k8s-gpu until it has written the file, as it does on a machine without GPUs, too.
func ownLabels(t *testing.T, program string, m *simdriver.Machine, config string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, "gfd")
	var log bytes.Buffer
	c := exec.CommandContext(t.Context(), program, "--config-file="+config, "--driver-root="+m.Root, "--driver-root-ctr-path="+m.Root,
		"--dev-root="+m.Root, "--sysfs-root="+m.Root+"/sys", "--procfs-root="+m.Root+"/proc", "--kubelet-socket=", "--pod-resources-socket=",
		"--state-dir="+dir, "--http-address=", "--features-file="+file, "--kernel-log=off")
	c.Stderr = &log
	check.NoError(t, c.Start())
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	defer func() {
		_ = c.Process.Signal(os.Interrupt)
		<-ended
	}()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("k8s-gpu: %v\n%s", err, log.String())
		default:
		}
		if _, err := os.Stat(file); err == nil {
			return read(t, file)
		}
		if time.Now().After(end) {
			t.Fatalf("no features file\n%s", log.String())
		}
	}
}

// read returns the labels of a features file without "nvidia.com/" and without the time, which must be there.
func read(t *testing.T, path string) map[string]string {
	t.Helper()
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	labels := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(string(text)), "\n") {
		name, value, _ := strings.Cut(line, "=")
		labels[strings.TrimPrefix(name, "nvidia.com/")] = value
	}
	if labels["gfd.timestamp"] == "" {
		t.Errorf("%s has no gfd.timestamp", path)
	}
	delete(labels, "gfd.timestamp")
	return labels
}
