// Package docs tests the documents: commands are run, configurations are read, links have targets. A block or a command of a kind that
// no test knows is a failure, so that none is left out.
package docs

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/docs/stage"
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(m.Run())
}

// elsewhere are the commands that need what no unit test has. Each has what they need, and where they are tried.
var elsewhere = []struct{ begins, why string }{
	{"nvidia-smi ", "a GPU"},
	{"make hardware", "a GPU; test/hardware runs the same on simulated machines"},
	{"go build -o bin/ ./cmd/... ./test/hardware", "the result is run on a machine with a GPU; make hardware builds the same"},
	{"scp bin/", "another machine"},
	{"ssh ", "another machine"},
	{"export CUDA_MPS_", "a GPU; test/conformance and test/rig have MPS daemons of their own"},
	{"mkdir -p $CUDA_MPS_", "a GPU"},
	{"CUDA_VISIBLE_DEVICES=GPU-", "a GPU"},
	{"nomad-gpu prove-gpu ", "a GPU; internal/cli (TestProveGPU) runs it with a CUDA driver for tests"},
	{"nomad-gpu clear --gpu 3", "a GPU with a condition; test/agents (TestDamagedHistory) clears one"},
	{"rm /var/lib/tandem/nomad-gpu.json.broken", "a damaged history; internal/node/history (TestDamagedHistoryPutsNoFaultyGPUBackToWork) removes one"},
	{"nomad-gpu reset ", "nvidia-smi; internal/cli (TestReset) runs it with that of a simulated machine"},
	{"tools/release/", "a release; test/release runs verify and push"},
	{"PATH=$(tools/release/tools ", "minutes; test/release/run has the same line"},
	{"cosign ", "a release; test/release verifies with the same options"},
	{"sha256sum --check --ignore-missing SHA256SUMS", "a release; tools/release/verify checks the same file"},
	{"make release ", "minutes, podman; test/release/run makes one"},
	{"ctr -n k8s.io images import ", "a node; test/e2e (TestInstallKubernetes) imports the same archive"},
	{"kubectl -n kube-system rollout ", "a cluster; test/e2e (TestRollouts, TestInstallKubernetes) runs the same"},
	{"helm ", "a cluster; test/e2e (TestChart) installs, upgrades, rolls back and uninstalls the chart"},
	{"kubectl -n kube-system delete daemonset tandem-k8s-gpu --cascade=orphan", "a cluster; test/e2e (TestChart) hands the DaemonSet over in this way"},
	{"kubectl get resourceslices ", "a cluster; test/e2e (TestDRA) has slices, TestChart prints the same command"},
	{"kubectl apply -f deploy/dra/examples/", "a cluster; test/e2e (TestDRA, TestChart) applies them all"},
	{"kubectl patch node NODE --subresource=status ", "a cluster; internal/kubeadapter/handover (TestTakeBack) makes the same patch"},
	{"kubectl annotate node NODE tandem.dev/gpu-faults-", "a cluster; internal/kubeadapter/handover (TestTakeBack) removes the annotation"},
	{"nomad job run ", "a cluster; test/e2e (TestNomadInstallJob) runs the job that installs the plugin"},
	{"kubectl -n gpu-fleet exec ", "a cluster; the end-to-end tests of gpu-fleet create the ledger"},
	{"kubectl get nodes -o jsonpath=", "a cluster with the hand-over; test/e2e (TestChart) writes the condition"},
	{"nomad alloc exec -task gpu-fleet ", "servers and a client; the end-to-end tests of gpu-fleet create the ledger"},
	{"apt install ./tandem-gpu-fleet_", "a Debian of its own; test/packages (TestDebian) installs the package"},
	{"systemctl enable --now gpu-fleet", "a Debian of its own; test/packages (TestDebian) starts the service"},
	{"gpu-fleet validate", "its configuration; cmd/gpu-fleet runs each command"},
	{"gpu-fleet status", "a process that runs; cmd/gpu-fleet runs each command"},
	{"runuser -u gpu-fleet ", "the account of the package; cmd/gpu-fleet runs each command"},
	{"nomad acl policy apply ", "servers with ACLs; test/e2e (TestNomadExamples) validates the job beside it"},
	{"crane copy ", "a registry; test/release copies the image"},
}

// block is the file that docs/install.md makes.
const block = "plugin \"nomad-gpu\" { config {} }\n"

// Every command of the documents is run and succeeds, or is of a kind that is checked otherwise.
func TestCommands(t *testing.T) {
	bin := filepath.Dir(binaries.Path(t, "k8s-gpu"))
	s, err := stage.New(t.Context(), coretest.ShortDir(t), bin, "h100x8")
	must(t, err)
	idle, err := stage.New(t.Context(), coretest.ShortDir(t), bin, "h100x8") // no agent runs here
	must(t, err)
	policy, err := os.ReadFile(filepath.Join(root, "deploy/policy/policy.yaml"))
	must(t, err)
	for _, dir := range []string{s.Dir, idle.Dir} { // the files that commands name
		must(t, os.WriteFile(dir+"/etc/tandem/policy.yaml", policy, 0o600))
		must(t, os.WriteFile(dir+"/etc/nomad.d/nomad-gpu.hcl", []byte(block), 0o600))
	}
	must(t, s.StartKubernetes(t.Context()))
	must(t, s.StartNomad(t.Context()))
	t.Cleanup(func() { must(t, s.Stop()) })
	used, ours := make([]bool, len(elsewhere)), 0
	for _, d := range documents(t) {
		for _, b := range d.Blocks {
			if b.Language != "sh" || generated(d.Path) || installs(d.Path, b.Section) {
				continue
			}
			for _, command := range stage.Commands(b.Text) {
				at := fmt.Sprintf("%s:%d: %s", d.Path, b.Line, command)
				if i := slices.IndexFunc(elsewhere, func(e struct{ begins, why string }) bool { return strings.HasPrefix(command, e.begins) }); i >= 0 {
					used[i] = true
					continue
				}
				if err := try(t.Context(), s, idle, command); err != nil {
					t.Errorf("%s: %v", at, err)
				}
				ours++
			}
		}
	}
	for i, e := range elsewhere {
		if !used[i] {
			t.Errorf("no document has a command that begins with %q: remove it from the table", e.begins)
		}
	}
	if ours < 15 {
		t.Errorf("only %d commands were run", ours)
	}
}

// installs reports whether the commands of a section change a machine or a cluster: test/e2e (TestInstallNomad, TestInstallKubernetes) runs
// them all on a fresh one.
func installs(path, section string) bool {
	begins := func(s string) bool { return strings.HasPrefix(section, s) }
	return path == "docs/install.md" && slices.ContainsFunc([]string{"nomad", "kubernetes", "a-kubelet", "without-a-network"}, begins)
}

// try runs or checks a command.
func try(ctx context.Context, s, idle *stage.Stage, command string) error {
	words := strings.Fields(command)
	_, inPod, exec := strings.Cut(command, " -- ")
	switch {
	case stage.IsOurs(command) && startsAgent(words), strings.Contains(command, " cdi remove"): // beside no other agent
		return runOn(ctx, idle, command, startsAgent(words))
	case stage.IsOurs(command):
		return runOn(ctx, s, command, false)
	case words[0] == "kubectl" && slices.Contains(words, "exec") && exec:
		return runOn(ctx, s, inPod, false)
	case words[0] == "kubectl" && slices.Contains(words, "-k"):
		_, err := os.Stat(filepath.Join(root, words[slices.Index(words, "-k")+1], "kustomization.yaml"))
		return err
	case words[0] == "make":
		return quiet(ctx, "make", append([]string{"--dry-run"}, words[1:]...)...)
	case words[0] == "go" && words[1] == "test":
		return quiet(ctx, "go", "vet", packageOf(words))
	case words[0] == "go" && words[1] == "run":
		return quiet(ctx, "go", "build", "-o", os.DevNull, packageOf(words))
	case words[0] == "curl":
		_, path, _ := strings.Cut(words[len(words)-1], ":9410")
		_, err := s.Get(ctx, path)
		return err
	}
	return fmt.Errorf("no test knows this kind of command: extend try, or the table of what is tried elsewhere")
}

// packageOf is the first argument of the go command that is a package.
func packageOf(words []string) string {
	i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "./") })
	return words[max(i, 0)]
}

// startsAgent reports whether a command has flags only.
func startsAgent(words []string) bool {
	for i, w := range words[1:] {
		if !strings.HasPrefix(w, "-") && (i == 0 || strings.Contains(words[i], "=") || !strings.HasPrefix(words[i], "-")) {
			return false
		}
	}
	return len(words) > 1
}

// runOn runs a command of ours. One that starts an agent must run until it is ended.
func runOn(ctx context.Context, s *stage.Stage, command string, agent bool) error {
	if agent {
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		r, err := s.Run(short, command)
		if err == nil && (short.Err() == nil || r.Code != 0) {
			err = fmt.Errorf("exit code %d\n%s", r.Code, r.Output)
		}
		return err
	}
	r, err := s.Run(ctx, command)
	if err == nil && r.Code != 0 && !found(command, r) {
		err = fmt.Errorf("exit code %d\n%s", r.Code, r.Output)
	}
	return err
}

// found reports whether a command has ended as documented because of what it has found: doctor on the machine of the test, which is no
// node of a cluster.
func found(command string, r stage.Result) bool {
	return strings.Contains(command, " doctor") && r.Code == cli.ExitFound && strings.Contains(r.Output, "PROBLEM")
}

func quiet(ctx context.Context, name string, args ...string) error {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = root
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

// Blocks are of a language that a test knows, and scripts have the syntax of a shell.
func TestLanguages(t *testing.T) {
	known := []string{"sh", "bash", "yaml", "hcl", "text", "json", "console"}
	for _, d := range documents(t) {
		for _, b := range d.Blocks {
			if !slices.Contains(known, b.Language) {
				t.Errorf("%s:%d: language %q: want one of %q; text is not checked", d.Path, b.Line, b.Language, known)
			}
			if b.Language != "bash" && b.Language != "sh" {
				continue
			}
			c := exec.CommandContext(t.Context(), "bash", "-n")
			c.Stdin = strings.NewReader(b.Text)
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%s:%d: %v: %s", d.Path, b.Line, err, out)
			}
		}
	}
}

var must = check.NoError
