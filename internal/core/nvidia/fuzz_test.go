package nvidia

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// FuzzKernelFiles: whatever sysfs, procfs and /dev contain, a NUMA node is the number in its file or -1, the minor numbers of
// a capability are those of its lines, and every node exists.
func FuzzKernelFiles(f *testing.F) {
	f.Add("0000:3b:00.0", "1\n", "gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n", "Tegra\n", "nvidia0")
	f.Add("../../..", "-1", "gpu0/gi4294967295/access 3", "", "nvidia-caps/nvidia-cap7")
	f.Add("", "99999999999999999999", "\x00", "\xff", "nvidia[")
	f.Add("0000:3b:00.0", "0x1", "gpu0/gi0/access 1048576", "Tegra194", "nvidia-caps")
	f.Fuzz(func(t *testing.T, pci, numa, minors, family, node string) {
		sys, dev := fstest.MapFS{"devices/soc0/family": {Data: []byte(family)}}, fstest.MapFS{}
		if p := path.Join("bus/pci/devices", pci, "numa_node"); strings.HasPrefix(p, "bus/pci/devices/") {
			sys[p] = &fstest.MapFile{Data: []byte(numa)}
		}
		if path.Clean("/"+node) == "/"+node && node != "" {
			dev[node] = &fstest.MapFile{}
		}
		s := &Session{sys: sys, dev: dev, proc: fstest.MapFS{"driver/nvidia-caps/mig-minors": {Data: []byte(minors)}}}

		if got := s.numaNode(gpu.PCIAddress(pci)); got < -1 || got >= 0 {
			if n, err := strconv.Atoi(strings.TrimSpace(numa)); err != nil || n != got {
				t.Errorf("NUMA node %d of %q", got, numa)
			}
		}
		for c, n := range s.capabilities() {
			gi, ci := s.capabilities().of(c.minor, gpu.Placement{GPU: "GPU-a", GI: c.gi, CI: c.ci})
			if (c.ci == gpu.Whole && gi != n) || (c.ci != gpu.Whole && ci != n) || n < 0 || n >= 1<<20 {
				t.Errorf("%+v is %d: %d, %d", c, n, gi, ci)
			}
		}
		for _, n := range s.Nodes() {
			if name := strings.TrimPrefix(n, "/dev/"); name != node || !strings.HasPrefix(path.Base(name), "nvidia") {
				t.Errorf("node %s, and %q is there", n, node)
			}
		}
		if isTegra(sys) && !strings.Contains(strings.ToLower(family), "tegra") {
			t.Errorf("%q is no Tegra", family)
		}
	})
}

// FuzzDriversText: any contents of NVML's fixed arrays give a string or an error, never a panic.
func FuzzDriversText(f *testing.F) {
	f.Add([]byte("00000000:3B:00.0\x00junk"), 12080)
	f.Add([]byte(""), -1)
	f.Add([]byte("\xff\xfe"), 1<<31-1)
	f.Fuzz(func(t *testing.T, text []byte, cuda int) {
		chars := make([]int8, len(text))
		for i, b := range text {
			chars[i] = int8(b)
		}
		want, _, _ := strings.Cut(string(text), "\x00")
		if got := cString(chars); got != want {
			t.Errorf("%q of %q", got, text)
		}
		if v := cudaVersion(cuda); v != "" {
			major, minor, ok := strings.Cut(v, ".")
			a, errA := strconv.Atoi(major)
			b, errB := strconv.Atoi(minor)
			if !ok || errA != nil || errB != nil || a*1000+b*10 > cuda || slices.Contains([]int{a, b}, -1) {
				t.Errorf("CUDA %q of %d", v, cuda)
			}
		}
	})
}

// FuzzParseMIGMinors: the parsed capabilities, formatted and parsed again, are the same.
func FuzzParseMIGMinors(f *testing.F) {
	f.Add("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
	f.Add("gpu-1/gi0/access 3")
	f.Add("gpu0/gi0/access 99999999999999999999")
	f.Fuzz(func(t *testing.T, text string) {
		got := parseMIGMinors(text)
		var again strings.Builder
		for c, n := range got {
			if c.ci == gpu.Whole {
				fmt.Fprintf(&again, "gpu%d/gi%d/access %d\n", c.minor, c.gi, n)
			} else {
				fmt.Fprintf(&again, "gpu%d/gi%d/ci%d/access %d\n", c.minor, c.gi, c.ci, n)
			}
			if c.minor < 0 || n < 0 || c.gi == gpu.Whole {
				t.Errorf("%+v: %d", c, n)
			}
		}
		if diff := cmp.Diff(got, parseMIGMinors(again.String()), cmp.AllowUnexported(migCapability{})); diff != "" {
			t.Error(diff)
		}
	})
}
