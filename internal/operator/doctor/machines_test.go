package doctor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// host is a simulated machine with all that an operator sets up on a node, beneath one root: nothing is wrong with it.
type host struct {
	*simdriver.Machine
	t       *testing.T
	program string
	args    []string // beside those of the roots
	kubelet *kubelettest.Kubelet
}

const nomadConfig = `data_dir = "/opt/nomad"
client { enabled = true }
plugin "nomad-gpu" {
  config { fingerprint_period = "30s" }
}
`

// newHost lays out a healthy host for one of the programs.
func newHost(t *testing.T, program, machine string) *host {
	h := &host{Machine: simdriver.StartParallel(t, machine), t: t, program: program}
	h.write("usr/bin/nvidia-container-runtime", "#!/bin/sh\n")
	h.write("etc/nvidia-container-runtime/config.toml", "#accept-nvidia-visible-devices-envvar-when-unprivileged = true\n[nvidia-container-cli]\nload-kmods = true\n")
	h.write("state/.keep", "")
	h.write("kmsg", "6,1,1000,-;Linux version 6.8.0-45-generic\n")
	h.write("proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
	h.args = []string{"--host-root", h.Root, "--driver-root", h.Root, "--dev-root", h.Root, "--sysfs-root", h.Root + "/sys", "--procfs-root", h.Root + "/proc", "--state-dir", h.Root + "/state"}
	if program == "nomad-gpu" {
		h.write("etc/nomad.d/nomad.hcl", nomadConfig)
		h.write("opt/nomad/plugins/nomad-gpu", "#!/bin/sh\n")
		h.must(os.Chmod(filepath.Join(h.Root, "opt/nomad/plugins/nomad-gpu"), 0o755))
		h.process(100, "/usr/bin/nomad", "agent", "-config=/etc/nomad.d")
		h.process(101, "/usr/bin/dockerd")
		h.write("etc/docker/daemon.json", `{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}`)
		return h
	}
	dir := coretest.ShortDir(t)
	h.kubelet = kubelettest.New(filepath.Join(dir, "device-plugins"))
	h.must(h.kubelet.Start())
	t.Cleanup(h.kubelet.Stop)
	h.must(os.Mkdir(dir+"/pod-resources", 0o755))
	pods, err := kubelettest.ServePodResources(dir + "/pod-resources/kubelet.sock")
	h.must(err)
	t.Cleanup(pods.Close)
	h.args = append(h.args, "--cdi-dir", h.Root+"/cdi", "--kernel-log", h.Root+"/kmsg",
		"--kubelet-socket", h.kubelet.Socket(), "--pod-resources-socket", dir+"/pod-resources/kubelet.sock")
	return h
}

func (h *host) must(err error) {
	h.t.Helper()
	check.NoError(h.t, err)
}

// write replaces a file of the host.
func (h *host) write(path, text string) {
	h.t.Helper()
	path = filepath.Join(h.Root, path)
	h.must(os.MkdirAll(filepath.Dir(path), 0o755))
	h.remove(path) // it may be a link to a file that tests share
	h.must(os.WriteFile(path, []byte(text), 0o644))
}

func (h *host) remove(path string) {
	h.t.Helper()
	if !filepath.IsAbs(path) {
		path = filepath.Join(h.Root, path)
	}
	h.must(os.RemoveAll(path))
}

func (h *host) link(path, target string) {
	h.t.Helper()
	path = filepath.Join(h.Root, path)
	h.must(os.MkdirAll(filepath.Dir(path), 0o755))
	h.remove(path)
	h.must(os.Symlink(target, path))
}

// process adds a process to the host's procfs.
func (h *host) process(pid int, args ...string) {
	h.t.Helper()
	dir := fmt.Sprintf("proc/%d/", pid)
	name := filepath.Base(args[0])
	h.write(dir+"comm", name[:min(len(name), 15)]+"\n")
	h.write(dir+"cmdline", strings.Join(args, "\x00")+"\x00")
	h.link(dir+"cwd", "/")
}

// policy is used by the agent.
func (h *host) policy(text string) {
	h.t.Helper()
	h.write("policy.yaml", text)
	h.args = append(h.args, "--config-file", h.Root+"/policy.yaml")
}

// library is where the simulated driver's library is.
const library = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"

// slotPCI is the folder of a GPU on the PCI bus.
func (h *host) slotPCI(slot int) string {
	h.t.Helper()
	pci, err := h.Get(slot, "pci")
	h.must(err)
	return "sys/bus/pci/devices/" + pci
}

func run(t *testing.T, program string, args ...string) (code int, stdout string) {
	t.Helper()
	r := execute(t.Context(), binaries.Path(t, program), args...)
	if r.stderr != "" {
		t.Errorf("%s %v: %s", program, args, r.stderr)
	}
	return r.code, r.stdout
}

// result is what a program has printed.
type result struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// execute runs a program. Any goroutine may call it.
func execute(ctx context.Context, path string, args ...string) (r result) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=/nowhere"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	start := time.Now()
	_ = cmd.Run()
	return result{cmd.ProcessState.ExitCode(), out.String(), errs.String(), time.Since(start)}
}

// findings are those of a result, without the clock and the inotify instances of this machine.
func (r result) findings(t *testing.T) []doctor.Finding {
	t.Helper()
	var got struct{ Findings []doctor.Finding }
	if err := json.Unmarshal([]byte(r.stdout), &got); err != nil || r.stderr != "" {
		t.Fatalf("%v: %s%s", err, r.stdout, r.stderr)
	}
	return slices.DeleteFunc(got.Findings, func(f doctor.Finding) bool { return f.Check == "clock" || f.Check == "inotify" })
}

var timestamp = regexp.MustCompile(`20\d\d-\d\d-\d\dT[0-9:]+Z`)

// text is a finding as the golden file has it.
func (h *host) text(f doctor.Finding) string {
	names := []string{h.Root, "$ROOT"}
	if h.kubelet != nil {
		names = append(names, filepath.Dir(filepath.Dir(h.kubelet.Socket())), "$KUBELET")
	}
	text := fmt.Sprintf("  %s %s: %s\n    at: %s\n    do: %s\n", f.Severity, f.Check, f.Found, f.Place, f.Remedy)
	return timestamp.ReplaceAllString(strings.NewReplacer(names...).Replace(text), "TIME")
}

// Each machine has one finding that matters, with place and remedy. The healthy ones have none.
func TestBrokenMachines(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: device nodes need root")
	}
	hosts := make([]*host, len(machines))
	results := make([]result, len(machines))
	running := make(chan struct{}, 8) // processes at once: each sleeps for most of a second
	var group sync.WaitGroup
	for i, c := range machines {
		h := newHost(t, c.program, c.on())
		hosts[i] = h
		c.breaks(h)
		path, args := binaries.Path(t, c.program), append(append([]string{"doctor"}, h.args...), "--json")
		group.Go(func() {
			running <- struct{}{}
			results[i] = execute(t.Context(), path, args...)
			<-running
		})
	}
	group.Wait()
	var golden strings.Builder
	for i, c := range machines {
		fmt.Fprintln(&golden, c.name)
		t.Run(c.name, func(t *testing.T) { golden.WriteString(checkMachine(t, c, hosts[i], results[i])) })
	}
	goldenfile.Compare(t, "testdata/machines.txt", golden.String())
}

func checkMachine(t *testing.T, c machine, h *host, r result) (golden string) {
	findings := r.findings(t)
	matter := slices.DeleteFunc(slices.Clone(findings), func(f doctor.Finding) bool {
		return f.Severity != doctor.Problem && f.Severity != doctor.Warning
	})
	want, wantCode := 1, 3
	if c.effect {
		want = 2
	}
	if c.healthy {
		want, wantCode = 0, 0
	} else if len(matter) == 1 && matter[0].Severity == doctor.Warning {
		wantCode = 0
	}
	if len(matter) != want || r.code != wantCode {
		t.Errorf("exit code %d, want %d; %d findings, want %d: %+v", r.code, wantCode, len(matter), want, findings)
	}
	if r.took > 40*time.Second { // each reading has 10 s, in two rounds; the machine may be loaded
		t.Errorf("took %v", r.took)
	}
	for _, f := range matter {
		if f.Found == "" || f.Place == "" || f.Remedy == "" || strings.Contains(f.Found, "\n") {
			t.Errorf("incomplete: %+v", f)
		}
		golden += h.text(f)
	}
	return golden
}

// doctor changes nothing: no file of the host, nor the state directory, which an agent would make.
func TestChangesNothing(t *testing.T) {
	for _, program := range []string{k8s, nomad} {
		h := newHost(t, program, "h100x8")
		h.remove("state")
		before := h.files()
		code, _ := run(t, program, append([]string{"doctor"}, h.args...)...)
		if diff := cmp.Diff(before, h.files()); diff != "" || code != 0 {
			t.Errorf("%s: exit code %d, %s", program, code, diff)
		}
	}
}

// files are the files of the node with their sizes and times, apart from the counters of the simulated driver.
func (h *host) files() map[string]string {
	h.t.Helper()
	files := map[string]string{}
	h.must(filepath.WalkDir(h.Root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.Name() == "calls":
			return fs.SkipDir
		}
		info, err := d.Info()
		if err == nil {
			files[path] = fmt.Sprint(info.Mode(), info.Size(), info.ModTime())
		}
		return err
	}))
	return files
}
