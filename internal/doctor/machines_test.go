package doctor_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/doctor"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/binaries"
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
	dir, err := os.MkdirTemp("", "k") // a short path: sockets
	h.must(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
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
	if err != nil {
		h.t.Fatal(err)
	}
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

// doctor runs the program.
func (h *host) doctor(extra ...string) (code int, stdout string, took time.Duration) {
	h.t.Helper()
	start := time.Now()
	code, stdout = run(h.t, h.program, append(append([]string{"doctor"}, h.args...), extra...)...)
	return code, stdout, time.Since(start)
}

func run(t *testing.T, program string, args ...string) (code int, stdout string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), binaries.Path(t, program), args...)
	cmd.Env = []string{"PATH=/nowhere"}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if exit := (*exec.ExitError)(nil); !errors.As(cmd.Run(), &exit) && cmd.ProcessState == nil {
		t.Fatalf("%s did not run", program)
	}
	if errs.Len() > 0 {
		t.Errorf("%s %v: %s", program, args, errs.String())
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

// findings runs the program and returns what it found, without the clock of this machine.
func (h *host) findings() (all []doctor.Finding, code int) {
	h.t.Helper()
	code, stdout, _ := h.doctor("--json")
	var got struct{ Findings []doctor.Finding }
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		h.t.Fatalf("%v: %s", err, stdout)
	}
	return slices.DeleteFunc(got.Findings, func(f doctor.Finding) bool {
		return f.Check == "clock" || f.Check == "inotify" || f.Check == "container runtime" && f.Severity == doctor.Note
	}), code
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
	texts := map[string]*string{}
	t.Run("machine", func(t *testing.T) {
		for _, c := range machines {
			texts[c.name] = new(string)
			t.Run(c.name, func(t *testing.T) {
				t.Parallel()
				*texts[c.name] = checkMachine(t, c)
			})
		}
	})
	var golden strings.Builder
	for _, c := range machines {
		fmt.Fprintf(&golden, "%s\n%s", c.name, *texts[c.name])
	}
	goldenfile.Compare(t, "testdata/machines.txt", golden.String())
}

func checkMachine(t *testing.T, c machine) (golden string) {
	h := newHost(t, c.program, c.on())
	c.breaks(h)
	findings, code := h.findings()
	matter := slices.DeleteFunc(slices.Clone(findings), func(f doctor.Finding) bool {
		return f.Severity != doctor.Problem && f.Severity != doctor.Warning
	})
	want, wantCode := 1, 3
	if c.healthy {
		want, wantCode = 0, 0
	} else if len(matter) == 1 && matter[0].Severity == doctor.Warning {
		wantCode = 0
	}
	if len(matter) != want || code != wantCode {
		t.Errorf("exit code %d, want %d; %d findings, want %d: %+v", code, wantCode, len(matter), want, findings)
	}
	for _, f := range matter {
		if f.Found == "" || f.Place == "" || f.Remedy == "" || strings.Contains(f.Found, "\n") {
			t.Errorf("incomplete: %+v", f)
		}
		golden += h.text(f)
	}
	return golden
}
