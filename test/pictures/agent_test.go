package pictures

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// agent is a k8s-gpu that runs on a simulated machine with eight H100.
type agent struct {
	*testing.T
	url     string
	driver  *simdriver.Machine
	kubelet *kubelettest.Kubelet
	pods    *kubelettest.PodResources
}

// startAgent starts the agent and waits until it is ready.
func startAgent(t *testing.T, settings ...string) *agent {
	t.Helper()
	dir, err := os.MkdirTemp("", "pictures") // a socket's path must be short
	must(t, err)
	t.Cleanup(func() { must(t, os.RemoveAll(dir)) })
	a := &agent{T: t, driver: simdriver.StartParallel(t, "h100x8"), kubelet: kubelettest.New(filepath.Join(dir, "kubelet"))}
	must(t, a.kubelet.Start())
	t.Cleanup(a.kubelet.Stop)
	pods := filepath.Join(dir, "pods", "kubelet.sock")
	a.pods, err = kubelettest.ServePodResources(pods)
	must(t, err)
	t.Cleanup(a.pods.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	a.url = "http://" + l.Addr().String()
	root := a.driver.Root
	cmd := exec.Command("../../bin/k8s-gpu", append([]string{
		"--driver-root=" + root, "--driver-root-ctr-path=" + root, "--dev-root=" + root, "--sysfs-root=" + root + "/sys", "--procfs-root=" + root + "/proc",
		"--kubelet-socket=" + a.kubelet.Socket(), "--pod-resources-socket=" + pods, "--state-dir=" + filepath.Join(dir, "state"),
		"--cdi-dir=" + filepath.Join(dir, "cdi"), "--kernel-log=off", "--http-address=" + l.Addr().String(), "--health-period=1s", "--health-settle=1s", "--recovery-dwell=1s",
	}, settings...)...)
	log, err := os.Create(filepath.Join(dir, "log"))
	must(t, err, l.Close())
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		must(t, cmd.Process.Signal(syscall.SIGTERM), cmd.Wait())
		if text, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("the log of the agent:\n%s", text)
		}
	})
	await(t, "the agent to be ready", func() bool {
		_, status := a.get("/readyz")
		return status == http.StatusOK
	})
	return a
}

func (a *agent) get(path string) (text string, status int) {
	r, err := http.Get(a.url + path)
	if err != nil {
		return err.Error(), 0
	}
	defer func() { _ = r.Body.Close() }()
	body, err := io.ReadAll(r.Body)
	must(a.T, err)
	return string(body), r.StatusCode
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(timeout); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", timeout, what)
		}
	}
}

// scrape returns the labels of each metric of the agent's page.
func (a *agent) scrape() map[string][]string {
	a.Helper()
	text, _ := a.get("/metrics")
	all := map[string][]string{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		name, rest, _ := strings.Cut(line[:strings.LastIndexByte(line, ' ')], "{")
		all[name] = slices.Concat(all[name], labelNames(rest))
	}
	return all
}

// labelNames are those in `a="1",b="2"}`. No value of an agent has a quote or a comma.
func labelNames(text string) (names []string) {
	for pair := range strings.SplitSeq(strings.TrimSuffix(text, "}"), ",") {
		if name, _, ok := strings.Cut(pair, "="); ok {
			names = append(names, name)
		}
	}
	return names
}
