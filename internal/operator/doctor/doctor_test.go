package doctor_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// situation is a node whose driver works, and what differs.
type situation struct {
	root    string
	system  doctor.FakeSystem
	options doctor.Options
	agent   *report.Report // of a running agent; nil = none runs
	driver  report.Report
}

func newSituation(t *testing.T) *situation {
	m := simdriver.StartParallel(t, "l40s")
	check.NoError(t, os.Mkdir(filepath.Join(m.Root, "state"), 0o755))
	s := &situation{root: m.Root}
	s.options = doctor.Options{
		Program: "k8s-gpu", HostRoot: m.Root, StateDir: m.Root + "/state", KernelLog: "/dev/null",
		Roots: core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"},
	}
	slots, err := m.Slots()
	check.NoError(t, err)
	s.driver.Driver = report.Driver{State: "ready", Version: "570.124.06", CUDA: "12.8"}
	for i, slot := range slots {
		pci, err := m.Get(slot, "pci")
		check.NoError(t, err)
		id := gpu.DeviceID(m.UUID(slot))
		s.driver.Devices = append(s.driver.Devices, report.Device{ID: id, GPU: id, Index: i, PCI: gpu.PCIAddress(pci), Pool: "gpu", Schedulable: true})
	}
	return s
}

func (s *situation) run(t *testing.T) []doctor.Finding {
	o := s.options
	if o.Agent == nil {
		o.Agent = func(context.Context) (report.Report, error) {
			if s.agent == nil {
				return report.Report{}, fmt.Errorf("%w: no socket", control.ErrNotRunning)
			}
			return *s.agent, nil
		}
	}
	if o.Driver == nil {
		o.Driver = func(context.Context) report.Report { return s.driver }
	}
	return doctor.Run(t.Context(), o.WithSystem(s.system))
}

// running lets an agent run that reports what the driver does.
func (s *situation) running() *report.Report {
	r := s.driver
	r.Devices = slices.Clone(r.Devices)
	s.agent = &r
	return s.agent
}

// proves sets a policy for proofs with a command.
func (s *situation) proves(command ...string) {
	s.options.Prove = proof.Default()
	s.options.Prove.Command = command
}

// resets sets a policy for resets, and what calls nvidia-smi.
func (s *situation) resets(mode reset.Mode, ready error) {
	s.options.Reset, s.options.Resetter = reset.Default(), resetter{ready: ready}
	s.options.Reset.Mode = mode
}

// resetter is what resets GPUs, of which doctor asks no more than whether it can.
type resetter struct {
	gpureset.Resetter
	ready error
}

func (r resetter) Ready(context.Context) error { return r.ready }

// opens has a process open the device nodes of GPUs.
func (s *situation) opens(t *testing.T, pid int, name string, minors ...int) {
	dir := fmt.Sprintf("%s/proc/%d", s.root, pid)
	check.NoError(t, os.MkdirAll(dir+"/fd", 0o755))
	check.NoError(t, os.WriteFile(dir+"/comm", []byte(name+"\n"), 0o600))
	for i, minor := range minors {
		check.NoError(t, os.Symlink(fmt.Sprintf("/nowhere/dev/nvidia%d", minor), fmt.Sprintf("%s/fd/%d", dir, i)))
	}
}

// What a simulated machine does not have: the operating system's part, and what a running agent reports.
func TestSituations(t *testing.T) {
	var golden strings.Builder
	for _, c := range []struct {
		name string
		set  func(*situation)
	}{
		{"healthy", func(*situation) {}},
		{"device cgroup", func(s *situation) { s.system.Denied = true }},
		{"disk full", func(s *situation) { s.system.Full = true }},
		{"clock never set", func(s *situation) { s.system.Now = time.Unix(0, 0) }},
		{"clock not synchronised", func(s *situation) { s.system.Unsynchronised = true }},
		{"inotify used up", func(s *situation) { s.system.Inotify = syscall.EMFILE }},
		{"not root", func(s *situation) { s.system.UID = 1000 }},
		{"not root, agent of root", func(s *situation) {
			s.system.UID = 1000
			s.options.Agent = func(context.Context) (report.Report, error) {
				return report.Report{}, fmt.Errorf("socket: %w", syscall.EACCES)
			}
		}},
		{"agent does not answer", func(s *situation) {
			s.options.Agent = func(context.Context) (report.Report, error) {
				return report.Report{}, &control.NotServedError{Path: "/state/k8s-gpu.sock"}
			}
		}},
		{"agent runs", func(s *situation) { s.running() }},
		{"agent without driver", func(s *situation) {
			s.running().Driver = report.Driver{State: "absent", Reason: "no NVIDIA driver"}
			s.agent.Devices = nil
		}},
		{"agent with another driver", func(s *situation) { s.running().Driver.Version = "535.183.01" }},
		{"agent lacks a GPU", func(s *situation) { r := s.running(); r.Devices = r.Devices[1:] }},
		{"agent has warnings", func(s *situation) {
			s.running().Problems = problem.Each(problem.HistorySave, "health history is not saved: no space left on device")
		}},
		{"second agent of one name", func(s *situation) {
			s.running().Problems = []problem.Problem{{Code: problem.DuplicateAgent, Text: "another process of this agent uses the same state_dir", Remedy: "give each its own, or stop one"}}
		}},
		{"policy warning", func(s *situation) {
			s.running().PolicyWarnings = []string{"p.yaml:3: policy.rules[0].select: no device has index 12"}
		}},
		{"held after a change of the policy", func(s *situation) {
			d := &s.running().Devices[0]
			d.Schedulable, d.Cause, d.Health = false, "HELD", "unhealthy: held (by pod ml/train under nvidia.com/gpu); action: end the workload, or wait for its end; cleared by: the end of the workload"
		}},
		{"taken for a proof", func(s *situation) {
			d := &s.running().Devices[0]
			d.Schedulable, d.Cause, d.Health = false, "PROVING", "unknown: withheld for a proof for a short time; cleared by: the end of the proof"
		}},
		{"proofs, not set up", func(s *situation) {
			s.proves("/nowhere/check")
			s.options.ProofSettings = []problem.Problem{
				{Text: "with occupancy = off the processes on a GPU are not read", Remedy: "set occupancy to report or withhold"},
				{Text: "without a state directory no other agent of the node knows that a GPU is proved", Remedy: "set the state directory"},
			}
		}},
		{"proofs, relative path", func(s *situation) { s.proves("check.sh") }},
		{"proofs, not root", func(s *situation) { s.system.UID = 1000; s.proves("/nowhere/check") }},
		{"proofs, seen from the node", func(s *situation) { s.options.HostRoot = ""; s.proves("/nowhere/check") }},
		{"proofs, seen from a container", func(s *situation) { s.options.Program = nomad; s.proves("/nowhere/check") }},
		{"proofs, too short a timeout", func(s *situation) {
			s.proves("/bin/true", "prove-gpu", "--json")
			s.options.Prove.Timeout = 30 * time.Second
		}},
		{"proofs, a timeout of its own", func(s *situation) {
			s.proves("/bin/true", "prove-gpu", "--timeout", "90s")
		}},
		{"proofs, time enough", func(s *situation) {
			s.proves("/bin/true", "prove-gpu", "--timeout=20s")
			s.options.Prove.Timeout = 30 * time.Second
		}},
		{"proofs, the record of work is not complete", func(s *situation) {
			s.proves("/bin/true")
			s.running().OwnersUnknown = &report.Unknown{Reason: "no token", Remedy: "set nomad_token_file"}
			s.agent.Proofs = []report.Proof{{GPU: s.agent.Devices[0].GPU}}
		}},
		{"proofs, another configuration", func(s *situation) { s.proves("/bin/true"); s.running() }},
		{"proofs that did not pass", func(s *situation) {
			s.proves("/bin/true")
			r := s.running()
			retry := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
			for i, p := range []report.Proof{
				{Result: "passed"}, {Result: "failed", Summary: "3 wrong words", Next: report.Next{WaitsFor: string(proof.WaitRepair)}},
				{Result: "failed", Summary: "3 wrong words", NeedsService: true, Next: report.Next{WaitsFor: string(proof.WaitService)}},
				{CouldNotRun: 2, Next: report.Next{WaitsFor: string(proof.WaitBackOff), Waits: "the check could not run: exit status 2", WaitsUntil: retry}},
			} {
				p.GPU, p.Index = r.Devices[i].GPU, i
				r.Proofs = append(r.Proofs, p)
			}
		}},
		{"proofs that did not pass, as conditions and warnings", func(s *situation) {
			s.proves("/bin/true")
			r := s.running()
			r.Proofs = []report.Proof{
				{GPU: r.Devices[0].GPU, Result: "failed", Next: report.Next{WaitsFor: string(proof.WaitRepair)}},
				{GPU: r.Devices[1].GPU, CouldNotRun: 1, Next: report.Next{WaitsFor: string(proof.WaitBackOff), Waits: "the check could not run: exit status 2"}},
			}
			r.Conditions = []report.Condition{{GPU: r.Devices[0].GPU, Cause: "PROOF_FAILED", State: health.Unhealthy, Action: "reset the GPU"}}
			r.Problems = []problem.Problem{{Code: problem.ProofNotRun, Object: string(r.Devices[1].GPU), Text: "the check of GPU-x could not run: exit status 2", Remedy: "run it by hand"}}
		}},
		{"resets off", func(s *situation) { s.resets(reset.Off, errors.New("must not be asked")) }},
		{"resets", func(s *situation) { s.resets(reset.Act, nil); s.running() }},
		{"resets, nothing can reset", func(s *situation) {
			s.resets(reset.Act, &gpureset.UnavailableError{Remedy: "run the component on this node", Err: errors.New("dial unix /var/lib/tandem/reset.sock: no such file")})
		}},
		{"resets, nothing can reset, and none would be", func(s *situation) { s.resets(reset.Report, errors.New("nvidia-smi: permission denied")) }},
		{"resets, not root", func(s *situation) {
			s.resets(reset.Act, errors.New("must not be asked"))
			s.system.UID = 1000
		}},
		{"resets, Nomad, files of another root", func(s *situation) {
			s.resets(reset.Act, errors.New("must not be asked"))
			s.options.Program = nomad
		}},
		{"resets, settings", func(s *situation) {
			s.resets(reset.Act, nil)
			s.options.ResetSettings = []problem.Problem{{Code: problem.ResetCannot, Text: "with occupancy = off the processes on a GPU are not read", Remedy: "set occupancy to report or withhold"}}
		}},
		{"proofs and resets, a setting of both", func(s *situation) {
			s.resets(reset.Act, nil)
			s.proves("/bin/true")
			both := problem.Problem{Text: "with occupancy = off the processes on a GPU are not read", Remedy: "set occupancy to report or withhold"}
			s.options.ResetSettings = []problem.Problem{both}
			s.options.ProofSettings = []problem.Problem{both, {Text: "prove.command is missing", Remedy: "set it"}}
		}},
		{"proofs and resets, owners are not known", func(s *situation) {
			s.resets(reset.Act, nil)
			s.proves("/bin/true")
			s.running().OwnersUnknown = &report.Unknown{Reason: "no token", Remedy: "set nomad_token_file"}
		}},
		{"resets, an old driver", func(s *situation) {
			s.resets(reset.Act, nil)
			s.driver.Driver.Version = "550.54.15"
		}},
		{"resets, MIG instances", func(s *situation) {
			s.resets(reset.Act, nil)
			for i := range 3 {
				s.driver.Devices[i].Index, s.driver.Devices[i].Instance = i/2, new(i%2)
			}
		}},
		{"resets, MIG instances that may be lost", func(s *situation) {
			s.resets(reset.Act, nil)
			s.options.Reset.LoseMIG = true
			s.driver.Devices[0].Instance = new(int)
		}},
		{"resets, processes have GPUs open", func(s *situation) {
			s.resets(reset.Act, nil)
			s.opens(t, 4001, "dcgm-exporter", 0, 1, 3)
			s.opens(t, 4002, "nvidia-persiste", 0, 1, 2, 3)
			s.opens(t, 4003, "k8s-gpu", 0, 1, 2, 3)
			s.opens(t, 4004, "python3", 3)
			s.running().Devices[3].Owners = []report.Owner{{Name: "llm-0"}}
		}},
		{"resets, owners are not known", func(s *situation) {
			s.resets(reset.Act, nil)
			s.opens(t, 4001, "dcgm-exporter", 0)
			s.running().OwnersUnknown = &report.Unknown{Reason: "no token", Remedy: "set nomad_token_file"}
		}},
		{"resets that wait for a person", func(s *situation) {
			s.resets(reset.Act, nil)
			r := s.running()
			waits := []reset.Wait{
				{Code: reset.WaitHeld, Text: "pod train/llm-0 has it"}, {Code: reset.WaitHandedOver, Text: "the driver asks for another repair than a reset: node reboot", Alert: true},
				{Code: reset.WaitBackOff, Text: "in-use: is open in dcgm-exporter (pid 2114)", Alert: true}, {Code: reset.WaitCannot, Text: "the component is missing", Alert: true},
			}
			for i := range waits {
				waits[i].GPU = r.Devices[i].GPU
			}
			*r = r.WithResets(reset.Result{Waits: waits})
		}},
		{"resets and proofs again and again", func(s *situation) {
			s.resets(reset.Act, nil)
			s.proves("/bin/true")
			r := s.running()
			r.Proofs = []report.Proof{{GPU: r.Devices[1].GPU, Result: "passed", Next: report.Next{
				WaitsFor: string(proof.WaitOften), Waits: "it was proved 2 times within a day, and has failed again each time",
			}}}
			wait := reset.Wait{GPU: r.Devices[0].GPU, Code: reset.WaitOften, Text: "XID_95 comes after 2 resets within a day", Alert: true}
			*r = r.WithResets(reset.Result{Waits: []reset.Wait{wait}})
		}},
		{"resets, programs that are paused", func(s *situation) {
			s.resets(reset.Act, nil)
			s.system.Container = "kubepods"
			s.options.ResetPause = reset.Pause{Programs: []string{"dcgm-exporter"}, Stop: []string{"/no/such/program"}, Resume: []string{"/bin/true"}}
			s.opens(t, 4001, "dcgm-exporter", 0)
			s.running()
		}},
		{"two faults at once", func(s *situation) {
			r := s.running()
			for i := range 2 {
				d := &r.Devices[i]
				d.Schedulable, d.Cause, d.Action = false, "ROW_REMAP_FAILED", "run field diagnostics, replace the GPU if they fail"
				d.Health = "unhealthy: row remapping failed; action: " + d.Action + "; cleared by: an operator (command clear)"
				r.Conditions = append(r.Conditions, report.Condition{
					GPU: d.GPU, Index: i, Cause: d.Cause, State: health.Unhealthy, Action: d.Action, Clears: "an operator (command clear)",
				})
			}
			xid := report.Condition{GPU: r.Devices[1].GPU, Index: 1, Cause: "XID_48", State: health.Unhealthy, Detail: "uncorrectable memory error",
				Action: "drain and reset the GPU", Clears: "a reset or a reboot"}
			ignored, recorded, other := xid, xid, xid
			ignored.Cause, ignored.IgnoredUntilGone = "XID_95", true
			recorded.Cause, recorded.RecordedOnly = "XID_80", true
			other.GPU, other.Index = r.Devices[2].GPU, 2 // takes work
			r.Conditions = append(r.Conditions, xid, ignored, recorded, other)
		}},
		{"agent has just started", func(s *situation) {
			s.running().Driver = report.Driver{State: "pending"}
			s.agent.Devices = nil
		}},
		{"agent has no CDI specification so far", func(s *situation) {
			r := s.running()
			r.CDI, r.Provisional = &report.CDI{Reason: report.CDINotWritten}, true
			d := &r.Devices[0]
			d.Schedulable, d.Cause, d.Health = false, "CDI_UNDEFINED", "unhealthy: no CDI definition (not written yet); action: run doctor; cleared by: its CDI definition"
		}},
		{"degraded GPUs take work", func(s *situation) {
			r := s.running()
			for i := range 2 {
				d := &r.Devices[i]
				d.State, d.Cause, d.Action = health.Degraded, "ROW_REMAP_PENDING", "reset the GPU when idle"
				d.Health = "degraded: row remap pending; action: reset the GPU when idle; cleared by: a reset after which the driver no longer reports it"
			}
		}},
		{"kernel log off", func(s *situation) { s.options.KernelLog = "" }},
		{"kernel log off, Nomad", func(s *situation) { s.options.KernelLog, s.options.Program = "", nomad }},
		{"state directory is a file, Nomad", func(s *situation) {
			s.options.Program, s.options.StateDir = nomad, s.root+"/state.txt"
			check.NoError(t, os.WriteFile(s.options.StateDir, nil, 0o600))
		}},
		{"hook program without memory limits", func(s *situation) {
			s.running().CDI = &report.CDI{Usable: true, Folder: "/var/run/cdi", NoMemoryLimits: "hook program /usr/bin/nvidia-ctk has version 1.19.1, which sets no memory limits: " +
				"NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST of containers have no effect"}
		}},
		{"agent has not recorded its GPUs so far", func(s *situation) {
			r := s.running()
			r.Provisional = true
			d := &r.Devices[0]
			d.Schedulable, d.Cause, d.Health = false, "OVERLAP", "unhealthy: offered by another agent (perhaps: not recorded so far); cleared by: the end of the other agent's offer"
		}},
		{"kernel log not readable, and the agent reports it", func(s *situation) {
			s.options.KernelLog = "/nowhere/kmsg"
			s.running().Problems = problem.Each(problem.KernelLog, "kernel log unavailable: "+health.WithoutKernelLog+": permission denied")
		}},
		{"kernel log not readable", func(s *situation) { s.options.KernelLog = "/nowhere/kmsg" }},
		{"SELinux", func(s *situation) {
			check.NoError(t, os.MkdirAll(s.root+"/sys/fs/selinux", 0o755))
			check.NoError(t, os.WriteFile(s.root+"/sys/fs/selinux/enforce", []byte("1"), 0o644))
		}},
		{"in a container without a library", func(s *situation) {
			s.options.HostRoot, s.system.Container = "", "KUBERNETES_SERVICE_HOST is set"
			s.options.Roots.Driver = ""
			s.driver = report.Report{Driver: report.Driver{State: "absent"}}
		}},
		{"NVML lists nothing", func(s *situation) {
			s.driver.Devices = nil
			check.NoError(t, os.RemoveAll(s.root+"/sys/bus"))
		}},
	} {
		s := newSituation(t)
		c.set(s)
		fmt.Fprintln(&golden, c.name)
		for _, f := range s.run(t) {
			if f.Severity == doctor.OK || f.Severity == doctor.Skipped || f.Check == "agent" && f.Severity == doctor.Note {
				continue
			}
			text := fmt.Sprintf("  %s %s: %s\n    at: %s\n    do: %s\n", f.Severity, f.Check, f.Found, f.Place, f.Remedy)
			golden.WriteString(strings.ReplaceAll(text, s.root, "$ROOT"))
		}
	}
	goldenfile.Compare(t, "testdata/situations.txt", golden.String())
}

// That GPUs can be reset is found only where what resets them was asked, and is ready.
func TestResetsAreReady(t *testing.T) {
	for name, c := range map[string]struct {
		uid   int
		ready error
		want  bool
	}{"ready": {want: true}, "not ready, mode report": {ready: errors.New("no component")}, "not asked": {uid: 1000}} {
		s := newSituation(t)
		s.resets(reset.Report, c.ready)
		s.system.UID = c.uid
		ok := slices.ContainsFunc(s.run(t), func(f doctor.Finding) bool { return f.Check == "reset" && f.Severity == doctor.OK })
		if ok != c.want {
			t.Errorf("%s: %t", name, ok)
		}
	}
}

// Each reason why the program that proves GPUs is not run is a problem with its remedy.
func TestProofProgram(t *testing.T) {
	s := newSituation(t)
	check.NoError(t, os.WriteFile(s.root+"/check", nil, 0o600))
	check.NoError(t, os.Chmod(s.root+"/check", 0o666))
	s.proves(s.root + "/check")
	remedies := map[string]bool{}
	for _, f := range s.run(t) {
		if f.Check == "prove" && f.Severity == doctor.Problem && strings.Contains(f.Found, s.root+"/check (mode -rw-rw-rw-") {
			remedies[f.Remedy] = true
		}
	}
	if !remedies["chmod go-w it, or install the program elsewhere"] || !remedies["chmod a+x it; its file system must not be mounted noexec"] {
		t.Errorf("%v", remedies)
	}
}

// Whatever hangs costs a bounded time, and is named.
func TestHangs(t *testing.T) {
	forever := make(chan struct{})
	defer close(forever)
	hang := func(context.Context) report.Report { <-forever; return report.Report{} }
	for name, set := range map[string]func(*doctor.Options){
		"driver": func(o *doctor.Options) { o.Driver = hang },
		"agent": func(o *doctor.Options) {
			o.Agent = func(ctx context.Context) (report.Report, error) { return hang(ctx), nil }
		},
		"cdi": func(o *doctor.Options) { o.CDI = func() []cdi.File { hang(nil); return nil } },
		"other": func(o *doctor.Options) {
			o.Checks = []doctor.Check{{Name: "other", Place: "somewhere", Look: func(ctx context.Context, _ *doctor.Facts) []doctor.Finding { hang(ctx); return nil }}}
		},
	} {
		s := newSituation(t)
		s.options.Limit = 300 * time.Millisecond
		set(&s.options)
		start := time.Now()
		findings := s.run(t)
		if took := time.Since(start); took > 5*time.Second { // 0.7 s; the machine may be loaded
			t.Errorf("%s: took %v", name, took)
		}
		want := name
		if name == "agent" {
			want = "driver" // they are read one after the other
		}
		if doctor.Problems(findings) != 1 || findings[0].Check != want || findings[0].Found != "no answer within 300ms" || findings[0].Remedy == "" {
			t.Errorf("%s: %+v", name, findings)
		}
	}
}

// A problem of the agent that an orchestrator's check finds itself is named once, by the check.
func TestProblemOfACheck(t *testing.T) {
	s := newSituation(t)
	s.running().Problems = []problem.Problem{
		{Code: problem.Leftovers, Text: "claims are left on this node"}, {Code: problem.HistorySave, Text: "health history is not saved"}}
	s.options.Checks = []doctor.Check{{Name: "dra", Place: "/var/lib/tandem", Decides: problem.Leftovers, Look: func(context.Context, *doctor.Facts) []doctor.Finding {
		return []doctor.Finding{{Check: "dra", Severity: doctor.Problem, Found: "prepared claims are left", Remedy: "put the component back"}}
	}}}
	var found []string
	for _, f := range s.run(t) {
		if f.Severity != doctor.OK {
			found = append(found, f.Check+": "+f.Found)
		}
	}
	if want := []string{"dra: prepared claims are left", "agent: health history is not saved"}; !slices.Equal(found, want) {
		t.Errorf("%q, want %q", found, want)
	}
}

// The text is what a person reads first, the JSON is for scripts.
func TestFormats(t *testing.T) {
	s := newSituation(t)
	check.NoError(t, os.Remove(s.root+"/dev/nvidia-uvm"))
	s.system.Unsynchronised = true
	findings := s.run(t)
	for _, format := range []struct {
		file  string
		write func(io.Writer, []doctor.Finding) error
	}{
		{"text", func(w io.Writer, f []doctor.Finding) error { return doctor.Write(w, f, false) }},
		{"all", func(w io.Writer, f []doctor.Finding) error { return doctor.Write(w, f, true) }},
		{"json", doctor.WriteJSON},
	} {
		var b bytes.Buffer
		check.NoError(t, format.write(&b, findings))
		goldenfile.Compare(t, "testdata/format."+format.file, strings.ReplaceAll(b.String(), s.root, "$ROOT"))
	}
}
