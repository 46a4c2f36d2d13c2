package cdi

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Every name gives a container its nodes, by each version of the library, in a cache that watches (Docker, containerd)
// and in one that does not (podman), also for a user without rights.
func TestResolvers(t *testing.T) {
	h := newHost(t)
	s := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "2g.20gb")
	h.nodes(t, s.Nodes, 511)
	h.run(t)
	h.m.read(t, s)
	number := map[string]string{} // "path:major:minor" by path
	for i, path := range s.Nodes {
		major := "195"
		if strings.Contains(path, "uvm") {
			major = "511"
		}
		number[path] = fmt.Sprintf("%s:%s:%d", path, major, i)
	}
	control := []string{number["/dev/nvidia-uvm"], number["/dev/nvidia-uvm-tools"]}
	own := map[string][]string{}
	for _, d := range s.Devices {
		for _, path := range d.OwnNodes() {
			own[string(d.ID)] = append(own[string(d.ID)], number[path])
		}
		own[d.CurrentIndex().String()] = own[string(d.ID)]
	}
	eachVersion(t, func(t *testing.T, reader string) {
		for _, user := range []uint32{0, 65534} {
			cmd := exec.CommandContext(t.Context(), reader, append([]string{"resolve", h.Folder}, names(s)...)...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("user %d: %v: %s", user, err, out)
			}
			lines := strings.Split(strings.TrimSpace(string(out)), "\n")
			if len(lines) != 2*len(names(s)) {
				t.Fatalf("user %d: %d lines: %s", user, len(lines), out)
			}
			for _, line := range lines {
				name, got, _ := strings.Cut(line, " ")
				_, device, _ := strings.Cut(name, "=")
				if device == "all" {
					continue
				}
				nodes, rest, _ := strings.Cut(got, " hooks=")
				want := map[string]bool{}
				for _, n := range append(append([]string{number["/dev/nvidiactl"]}, control...), own[device]...) {
					want[n] = true
				}
				for _, n := range strings.Fields(nodes) {
					if !want[n] {
						t.Errorf("%s: node %s", name, n)
					}
					delete(want, n)
				}
				if len(want) > 0 || !strings.HasPrefix(rest, "5 ") || !strings.Contains(rest, "NVIDIA_VISIBLE_DEVICES=void") {
					t.Errorf("%s: %s, without %v", name, got, want)
				}
			}
		}
	})
}

// specificationOf is the text of the specification that the agent writes for a snapshot.
func specificationOf(t *testing.T, s gpu.Snapshot) []byte {
	h := newHost(t)
	h.nodes(t, s.Nodes, 511)
	h.run(t)
	h.m.read(t, s)
	text, err := os.ReadFile(filepath.Join(h.Folder, vendor+"-gpu.json"))
	must(t, err)
	return text
}

// 10,000 replacements while the folder is read all the time by each version: no read finds an invalid file or misses a name.
func TestReplacedUnderReaders(t *testing.T) {
	s := coretest.GPUs(8)
	text := specificationOf(t, s)
	other := bytes.ReplaceAll(text, []byte("NVIDIA_VISIBLE_DEVICES=void"), []byte("NVIDIA_VISIBLE_DEVICES=void\",\"FURTHER=1"))
	dir := folder(t, memory)
	f := specfile.File{Path: filepath.Join(dir, vendor+"-gpu.json")}
	must(t, f.Replace(text, 0))
	var running []*process
	paths, err := readers()
	must(t, err)
	for _, reader := range paths {
		running = append(running, start(t, reader, append([]string{"poll", dir}, names(s)...)...))
	}
	count := 10_000
	if testing.Short() {
		count = 500
	}
	began := time.Now()
	for i := range count {
		must(t, f.Replace([][]byte{text, other}[i%2], i))
		time.Sleep(300 * time.Microsecond) // the readers need processors, too
	}
	for _, p := range running {
		must(t, p.in.Close())
		var reads, invalid, missing int
		_, err := fmt.Sscan(p.line(t), &reads, &invalid, &missing)
		must(t, err)
		t.Logf("%d replacements in %v: %d reads, %d invalid, %d with a missing name", count, time.Since(began), reads, invalid, missing)
		if reads < 100 || invalid > 0 || missing > 0 {
			t.Errorf("%d reads, %d invalid, %d with a missing name", reads, invalid, missing)
		}
	}
}

// A cache that watches the folder has each replacement: a few milliseconds later, tens on a machine with other work.
func TestWatchersSeeReplacements(t *testing.T) {
	text := specificationOf(t, coretest.GPUs(2))
	eachVersion(t, func(t *testing.T, reader string) {
		dir := folder(t, memory)
		f := specfile.File{Path: filepath.Join(dir, vendor+"-gpu.json")}
		must(t, f.Replace(text, 0))
		p := start(t, reader, "serve", dir)
		worst := 0
		for i := range 100 {
			variable := "NTH=" + strconv.Itoa(i)
			must(t, f.Replace(bytes.ReplaceAll(text, []byte("NVIDIA_VISIBLE_DEVICES=void"), []byte("NVIDIA_VISIBLE_DEVICES=void\",\""+variable)), i))
			answer := p.ask(t, "await "+variable+" "+vendor+"/gpu=0")
			took, err := strconv.Atoi(answer)
			if err != nil {
				t.Fatalf("replacement %d: %s", i, answer)
			}
			worst = max(worst, took)
			time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		}
		t.Logf("at most %d µs", worst) // a cache that misses one never has it, and the reader's wait fails
	})
}

// The node nvidia-uvm has another major number after the driver's module was loaded again. A runtime keeps the number that it found
// first until the file changes, so the file is replaced though it is equal.
func TestMajorsChange(t *testing.T) {
	eachVersion(t, func(t *testing.T, reader string) {
		h := newHost(t)
		s := coretest.GPUs(1)
		h.nodes(t, s.Nodes, 511)
		h.run(t)
		h.m.read(t, s)
		path := filepath.Join(h.Folder, vendor+"-gpu.json")
		text, err := os.ReadFile(path)
		must(t, err)
		p := start(t, reader, "serve", h.Folder)
		inject := func() string { return p.ask(t, "inject "+vendor+"/gpu="+string(coretest.GPU(0))) }
		if got := inject(); !strings.Contains(got, "/dev/nvidia-uvm:511:") {
			t.Fatal(got)
		}
		h.nodes(t, s.Nodes, 510)
		if got := inject(); !strings.Contains(got, "/dev/nvidia-uvm:511:") {
			t.Fatalf("the library looks at each node again: the file need not be replaced any more: %s", got)
		}
		h.m.reload(t, s)
		if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, text) {
			t.Fatalf("the file is another one: %v", err)
		}
		for began := time.Now(); ; time.Sleep(time.Millisecond) {
			got := inject()
			if strings.Contains(got, "/dev/nvidia-uvm:510:") {
				break
			}
			if time.Since(began) > 30*time.Second {
				t.Fatalf("the container gets the old number: %s", got)
			}
		}
	})
}

// A lost GPU whose node is gone fails its own container, by the node's path, and no other.
func TestMissingNodeFailsByName(t *testing.T) {
	h := newHost(t)
	s := coretest.GPUs(2)
	h.nodes(t, s.Nodes, 511)
	h.run(t)
	h.m.read(t, s)
	must(t, os.Remove(h.root+"/dev/nvidia1"))
	reading := coretest.GPUs(2)
	reading.Nodes = nil
	for _, n := range s.Nodes {
		if n != "/dev/nvidia1" {
			reading.Nodes = append(reading.Nodes, n)
		}
	}
	reading.Devices = reading.Devices[:1]
	h.m.read(t, gpu.NewSnapshot(reading))
	eachVersion(t, func(t *testing.T, reader string) {
		p := start(t, reader, "serve", h.Folder)
		if got := p.ask(t, "inject "+vendor+"/gpu="+string(coretest.GPU(0))); strings.HasPrefix(got, "error") {
			t.Error(got)
		}
		if got := p.ask(t, "inject "+vendor+"/gpu="+string(coretest.GPU(1))); !strings.HasPrefix(got, "error") || !strings.Contains(got, "/dev/nvidia1") {
			t.Error(got)
		}
	})
}
