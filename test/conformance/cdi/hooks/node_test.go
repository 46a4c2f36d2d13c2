package hooks

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	vendor   = "k8s.device-plugin.nvidia.com"
	resource = "nvidia.com/gpu.shared"
	small    = "nvidia.com/small" // GPU 7
	current  = "v1.20.1"          // the first version of NVIDIA's hook program that sets limits
	plenty   = 30 * time.Second
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// program is the path of NVIDIA's hook program in a version: "v1.20.1".
func program(t *testing.T, version string) string {
	t.Helper()
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		found, err := filepath.Glob(dir + "/nvidia-cdi-hook*")
		must(t, err)
		for _, path := range found {
			if info, err := buildinfo.ReadFile(path); err == nil && info.Main.Version == version {
				return path
			}
		}
	}
	t.Fatalf("no nvidia-cdi-hook %s in %s", version, os.Getenv("PATH"))
	return ""
}

// node is a simulated machine with k8s-gpu, whose CDI specifications are in /run/cdi, beside a kubelet.
type node struct {
	*simdriver.Machine
	*kubelettest.Kubelet
	specs      string // folder from which containers of runc get devices
	containers int
}

// newNode has NVIDIA's hook program in its current version.
func newNode(t *testing.T) *node {
	t.Helper()
	text, err := simdriver.Text("h100x8")
	must(t, err)
	text, err = simdriver.WithLimits(text, simdriver.Misc, hierarchy, "memacct_controller = "+controller())
	must(t, err)
	conf := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(conf, []byte(text), 0o600))
	n := &node{Machine: simdriver.StartParallel(t, conf), Kubelet: kubelettest.New(t.TempDir()), specs: specFolder}
	must(t, n.Kubelet.Start())
	t.Cleanup(n.Stop)
	n.install(t, current)
	must(t, os.RemoveAll(specFolder)) // of another test
	var log bytes.Buffer
	agent := exec.Command(filepath.Join(os.Getenv(inside), "k8s-gpu"),
		"--driver-root="+n.Root, "--sysfs-root="+n.Root+"/sys", "--procfs-root="+n.Root+"/proc", "--http-address=", "--kernel-log=off", "--log-format=text",
		"--kubelet-socket="+n.Socket(), "--pod-resources-socket=", "--state-dir="+t.TempDir(),
		"--device-list-strategy=cdi-cri", "--nvidia-cdi-hook-path="+n.hook(), "--config-file="+policy(t))
	agent.Stdout, agent.Stderr = &log, &log
	must(t, agent.Start())
	t.Cleanup(func() {
		_ = agent.Process.Signal(syscall.SIGTERM)
		_ = agent.Wait()
		if t.Failed() {
			t.Logf("agent:\n%s", &log)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), plenty)
	defer cancel()
	must(t, n.AwaitHealthy(ctx, resource, 3*7))
	for ctx.Err() == nil { // the specification of limits follows, when the agent knows by which controller the driver limits memory
		if _, err := os.Stat(specFolder + "/" + vendor + "-memory-limit.json"); err == nil {
			return n
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("no specification of limits")
	return n
}

// policy is a file with a policy that limits the memory of shares to 20480 MiB and, on one GPU, to 10240.
func policy(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "policy.yaml")
	must(t, os.WriteFile(path, []byte(`version: v1
memoryLimits: {experimental: true}
policy:
  rules:
    - {select: {index: 7}, use: time-slicing, replicas: 3, limit: best-effort, memory: 10GiB, name: small}
    - {select: {model: "*"}, use: time-slicing, replicas: 3, limit: best-effort, memory: 20480MiB}
`), 0o644))
	return path
}

// hook is where container runtimes find the hook program.
func (n *node) hook() string { return n.Root + "/usr/bin/nvidia-cdi-hook" }

// install replaces the hook program.
func (n *node) install(t *testing.T, version string) {
	t.Helper()
	text, err := os.ReadFile(program(t, version))
	must(t, err)
	must(t, os.MkdirAll(filepath.Dir(n.hook()), 0o755))
	must(t, os.WriteFile(n.hook()+".new", text, 0o755))
	must(t, os.Rename(n.hook()+".new", n.hook()))
}

// limit is what the driver has for a control group, in bytes.
type limit struct{ soft, hard uint64 }

// entry is of which group, below the mount point, and of which GPU a limit is.
type entry struct{ group, gpu string }

// limits is the simulated driver's own table (memacct.c): also of groups that have ended.
func (n *node) limits(t *testing.T) map[entry]limit {
	t.Helper()
	table, err := os.ReadFile(n.Root + "/memacct")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	groups, all := map[string]string{}, map[entry]limit{} // by address
	for line := range strings.Lines(string(table)) {
		words := strings.Fields(line)
		switch words[0] {
		case "group":
			groups[words[1]] = strings.TrimPrefix(words[3], hierarchy)
		case "entry":
			soft, err := strconv.ParseUint(words[3], 10, 64)
			must(t, err)
			hard, err := strconv.ParseUint(words[4], 10, 64)
			must(t, err)
			all[entry{groups[words[2]], words[1]}] = limit{soft, hard}
		}
	}
	return all
}

// freeze has the containers of runc get what the specifications have now, also when the agent replaces them.
func (n *node) freeze(t *testing.T) {
	t.Helper()
	n.specs = t.TempDir()
	must(t, os.CopyFS(n.specs, os.DirFS(specFolder)))
}
