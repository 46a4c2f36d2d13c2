package docs

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/docs/stage"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// step is one thing that a new user does.
type step struct {
	text    string // before the command
	command string // as on a real machine; "GET PATH" is a request to the status page's server; "" = none
	code    int    // exit code
	shows   string // text in the output, for which the step waits
	picture string // the file that has the output as a picture; "" = none
	before  func(*stage.Stage) error
}

const unwell = 3 // the slot whose GPU fails

var noGPU = []step{
	{text: "## A machine without a GPU\n\nNo agent runs, and nothing is installed. `doctor` looks for what is missing:",
		command: "k8s-gpu doctor", code: 3, shows: "no NVIDIA GPU on the PCI bus"},
	{text: "`inspect` shows what an agent that starts now would offer:", command: "nomad-gpu inspect", shows: "no agent is running"},
	{text: "An agent that is started here waits for a driver, and reports no error to its orchestrator."},
}

var kubernetes = []step{
	{text: "## Eight GPUs under Kubernetes\n\nThe agent runs beside a kubelet (the machine is simulated: an HGX H100). Is all in order?",
		command: "k8s-gpu doctor", shows: "0 problems"},
	{text: "What is offered, with the health of each device. A pod has two:", command: "k8s-gpu inspect", shows: "research/train",
		before: func(s *stage.Stage) error {
			s.Pods.Hold("research/train", "nvidia.com/gpu", s.Machine.UUID(0), s.Machine.UUID(1))
			return nil
		}},
	{text: "What the devices do, and which work has them; without `--once` it is a live screen:", command: "k8s-gpu top --once", shows: "research/train"},
	{text: "What a request for two GPUs would get, and why:", command: "k8s-gpu explain --count 2", shows: "GPU-"},
	{text: "### A fault\n\nGPU 3 falls off the bus. Within seconds it gets no new work, without a command. The reason:",
		command: "k8s-gpu inspect", shows: "LOST  lost", before: func(s *stage.Stage) error { return s.Machine.Lose(unwell) }},
	{text: "The cause `LOST` is in [operations](operations.md#causes), with what to do. `doctor` finds it, too:", command: "k8s-gpu doctor", code: 3, shows: "PROBLEM"},
	{text: "The agent serves a status page (`/`: [monitoring](monitoring.md) has pictures), metrics and its readiness:", command: "GET /readyz", shows: "offered to the kubelet"},
	{text: "### Recovery\n\nThe GPU answers again. It gets work when its checks have been clean for a minute (here two seconds):",
		command: "k8s-gpu inspect", shows: "3    GPU-94b996fc-c2a1-5f89-9d90-44189fb7fcc9  0000:61:00.0  0     81559 MiB  healthy",
		before: func(s *stage.Stage) error { return s.Machine.Restore(unwell) }},
}

var nomad = []step{
	{text: "## The same under Nomad\n\nThe plugin runs under a Nomad client. An XID that requires a reset, which the driver recommends, too:",
		command: "nomad-gpu inspect", shows: "a reset or a reboot\nGPU 3  RECOVERY_ACTION_GPU_RESET", picture: "inspect.svg",
		before: func(s *stage.Stage) error {
			if err := s.Machine.Set(unwell, "recovery_action", "1"); err != nil {
				return err
			}
			return s.Machine.XID(unwell, 95)
		}},
	{text: "To reset it, drain the node, and let the agent close the driver:", command: "nomad-gpu quiesce", shows: "released"},
	{text: "Now `nvidia-smi --gpu-reset -i 3` finds no process that has the GPU open. Then:", command: "nomad-gpu resume", shows: "driver",
		before: func(s *stage.Stage) error { return s.Machine.Reset(unwell) }},
	{text: "The driver reports no recovery action any more:", command: "nomad-gpu inspect", shows: "3    GPU-94b996fc-c2a1-5f89-9d90-44189fb7fcc9  0000:61:00.0  0     81559 MiB  healthy"},
}

var beside = []step{
	{text: "## Beside the plugin that runs now\n\nOn another node NVIDIA's plugin offers the GPUs. `shadow` registers nothing. It reads from the\n" +
		"kubelet what the other plugin offers, and prints what k8s-gpu would do otherwise. GPU 3 is lost, which the other plugin has not noticed:",
		command: "k8s-gpu shadow --once", code: 3, shows: "differences",
		before: func(s *stage.Stage) error { return s.Machine.Lose(unwell) }},
}

const walkthroughHead = `<!-- Written by ` + "`go test ./test/docs -run Walkthrough -update`" + ` from the output of the programs; do not edit. -->

# Walkthrough

What a new user sees, from a machine without a GPU to a fault and its end. Each block is a command and its real output. Times are replaced;
findings of ` + "`doctor`" + ` about the machine that wrote this (its clock, container runtime and toolkit) are left out.

`

// TestWalkthrough does what docs/walkthrough.md and the picture of README.md show, and compares it with them. -update writes them.
func TestWalkthrough(t *testing.T) {
	bin := filepath.Dir(binaries.Path(t, "k8s-gpu"))
	var out strings.Builder
	out.WriteString(walkthroughHead)
	for _, part := range []struct {
		machine string
		steps   []step
		start   func(*stage.Stage)
	}{
		{"", noGPU, func(*stage.Stage) {}},
		{"h100x8", kubernetes, func(s *stage.Stage) { must(t, s.StartKubernetes(t.Context())) }},
		{"h100x8", nomad, func(s *stage.Stage) { must(t, s.StartNomad(t.Context())) }},
		{"h100x8", beside, func(s *stage.Stage) { otherPlugin(t, s) }},
	} {
		s, err := stage.New(t.Context(), coretest.ShortDir(t), bin, part.machine)
		must(t, err)
		part.start(s)
		for _, step := range part.steps {
			do(t, s, step, &out)
		}
		must(t, s.Stop())
	}
	goldenfile.Compare(t, "../../docs/walkthrough.md", strings.TrimRight(out.String(), "\n")+"\n")
}

// otherPlugin is a kubelet's pod-resources API on the stage, with every GPU offered by another plugin.
func otherPlugin(t *testing.T, s *stage.Stage) {
	t.Helper()
	kubelet, err := kubelettest.ServePodResources(filepath.Join(s.Dir, "var/lib/kubelet/pod-resources/kubelet.sock"))
	must(t, err)
	t.Cleanup(kubelet.Close)
	slots, err := s.Machine.Slots()
	must(t, err)
	for _, slot := range slots {
		kubelet.Offer("nvidia.com/gpu", int64(slot/4), s.Machine.UUID(slot))
	}
}

// do does a step, repeatedly until the output shows what it has to.
func do(t *testing.T, s *stage.Stage, step step, out *strings.Builder) {
	t.Helper()
	if step.before != nil {
		must(t, step.before(s))
	}
	fmt.Fprintf(out, "%s\n\n", step.text)
	if step.command == "" {
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		r, shown := attempt(ctx, s, step)
		text := settled(r.Output)
		if strings.Contains(text, step.shows) && r.Code == step.code {
			fmt.Fprintf(out, "```console\n$ %s\n%s```\n\n", shown, text)
			if step.picture != "" {
				goldenfile.Compare(t, "../../docs/images/"+step.picture, picture(shown, text))
			}
			return
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
			t.Errorf("%s: exit code %d, want %d, and %q in the output:\n%s", step.command, r.Code, step.code, step.shows, r.Output)
			return
		}
	}
}

// attempt runs the command of a step. shown is the command for the document.
func attempt(ctx context.Context, s *stage.Stage, step step) (r stage.Result, shown string) {
	if path, get := strings.CutPrefix(step.command, "GET "); get {
		text, err := s.Get(ctx, path)
		if err != nil {
			return stage.Result{Output: err.Error(), Code: 1}, ""
		}
		return stage.Result{Output: strings.TrimRight(text, "\n") + "\n"}, "curl -s http://127.0.0.1:9410" + path
	}
	r, err := s.Run(ctx, step.command)
	if err != nil {
		return stage.Result{Output: err.Error(), Code: -1}, ""
	}
	return r, step.command
}

var (
	moment   = regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d(\.\d+)?)?Z`)
	clock    = regexp.MustCompile(`(  )\d\d:\d\d:\d\d `)
	others   = regexp.MustCompile(`(?m)^ok +.*\n|, \d+ warnings?$`) // of doctor: what else it looked at
	duration = regexp.MustCompile(` +\b(\d+(\.\d+)?(ms|s|m|h))+\b`)
)

// hostFindings are the findings of doctor about the machine on which the test runs, each with its lines for place and remedy.
var hostFindings = []string{"clock", "nomad", "container runtime", "toolkit", "kubelet", "pod resources", "kernel log", "cgroup", "security"}

// settled is an output without what differs from one run to the next.
func settled(output string) string {
	var kept []string
	skip := false
	for _, line := range strings.Split(strings.TrimRight(output, "\n"), "\n") {
		level, rest, _ := strings.Cut(line, " ")
		if slices.Contains([]string{"PROBLEM", "WARNING", "note"}, level) {
			name, _, _ := strings.Cut(strings.TrimSpace(rest), ":")
			skip = slices.Contains(hostFindings, name)
		} else if !strings.HasPrefix(line, "         ") {
			skip = false
		}
		if !skip {
			kept = append(kept, strings.TrimRight(line, " "))
		}
	}
	text := strings.Join(kept, "\n") + "\n"
	text = moment.ReplaceAllString(text, "2026-11-20T10:31Z")
	text = duration.ReplaceAllStringFunc(text, func(d string) string { return fmt.Sprintf("%*s", len(d), "5s") }) // columns keep their width
	text = clock.ReplaceAllString(text, "${1}10:31:00 ")
	return strings.TrimLeft(others.ReplaceAllString(text, ""), "\n")
}
