package main

import (
	"bytes"
	"context"
	"flag"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/binaries"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f != nil && f.Value.String() == f.DefValue {
		_ = f.Value.Set("8") // the tests wait more than they compute
	}
	os.Exit(m.Run())
}

// binary is the program as "make build" builds it.
func binary(t *testing.T) string {
	t.Helper()
	dir, err := binaries.Dir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "k8s-gpu")
}

// testAgent is a running k8s-gpu.
type testAgent struct {
	*testing.T
	ctx    context.Context
	cmd    *exec.Cmd
	exited chan struct{} // closed when it has
	log    *log
}

// log collects what a process writes and wakes those who wait for a line.
type log struct {
	mu    sync.Mutex
	text  bytes.Buffer
	wrote chan struct{}
}

func (l *log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.wrote)
	l.wrote = make(chan struct{})
	return l.text.Write(p)
}

func (l *log) state() (string, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String(), l.wrote
}

// start runs an agent that knows nothing of this machine but what args say.
func start(t *testing.T, args ...string) *testAgent {
	t.Helper()
	return startOn(t, nil, args...)
}

// startOn runs an agent whose log goes to a file, if there is one.
func startOn(t *testing.T, stderr *os.File, args ...string) *testAgent {
	t.Helper()
	apart := []string{"--http-address=127.0.0.1:0", "--state-dir=" + shortDir(t), "--kernel-log=off"}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	a := &testAgent{T: t, ctx: ctx, exited: make(chan struct{}), log: &log{wrote: make(chan struct{})}}
	a.cmd = exec.CommandContext(ctx, binary(t), append(apart, args...)...)
	a.cmd.Stderr = a.log
	if stderr != nil {
		a.cmd.Stderr = stderr
	}
	if err := a.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = a.cmd.Wait() // what it ended with is in ProcessState
		close(a.exited)
	}()
	t.Cleanup(func() {
		cancel()
		<-a.exited
		if t.Failed() {
			text, _ := a.log.state()
			t.Log(text)
		}
	})
	return a
}

// said waits for a match in the log and returns its first group.
func (a *testAgent) said(pattern string) string {
	a.Helper()
	re := regexp.MustCompile(pattern)
	for {
		text, wrote := a.log.state()
		if m := re.FindStringSubmatch(text); m != nil {
			return m[len(m)-1]
		}
		select {
		case <-wrote:
		case <-a.ctx.Done():
			a.Fatalf("never said %s", pattern)
		}
	}
}

// saidLast waits for a match in the log and returns the first group of the last one.
func (a *testAgent) saidLast(pattern string) string {
	a.Helper()
	a.said(pattern)
	text, _ := a.log.state()
	all := regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1)
	return all[len(all)-1][1]
}

// times counts the matches in the log.
func (a *testAgent) times(pattern string) int {
	text, _ := a.log.state()
	return len(regexp.MustCompile(pattern).FindAllString(text, -1))
}

// signal sends one to the agent.
func (a *testAgent) signal(s syscall.Signal) {
	a.Helper()
	if err := a.cmd.Process.Signal(s); err != nil {
		a.Fatal(err)
	}
}

// await polls for what comes by itself.
func (a *testAgent) await(what string, is func() bool) {
	a.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-a.ctx.Done():
			a.Fatalf("never came: %s", what)
		}
	}
}

// ended waits for the end and returns the exit code.
func (a *testAgent) ended() int {
	a.Helper()
	select {
	case <-a.exited:
		return a.cmd.ProcessState.ExitCode()
	case <-a.ctx.Done():
		a.Fatal("still running")
		return 0
	}
}

// get fetches a page of the agent.
func (a *testAgent) get(path string) (int, string) {
	a.Helper()
	r, err := http.NewRequestWithContext(a.ctx, http.MethodGet, "http://"+a.saidLast(`http=(\S+)`)+path, nil)
	if err != nil {
		a.Fatal(err)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		a.Fatal(err)
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		a.Fatal(err)
	}
	return response.StatusCode, string(body)
}

// awaitReady polls /readyz, as its reader would.
func (a *testAgent) awaitReady(want string) {
	a.Helper()
	a.await("/readyz with "+want, func() bool {
		code, text := a.get("/readyz")
		return code == http.StatusOK && strings.Contains(text, want)
	})
}

// startKubelet runs a kubelet on a folder with a short path.
func startKubelet(t *testing.T) *kubelettest.Kubelet {
	t.Helper()
	k := kubelettest.New(shortDir(t))
	t.Cleanup(k.Stop)
	if err := k.Start(); err != nil {
		t.Fatal(err)
	}
	return k
}

// shortDir is a folder of the test's own; t.TempDir's path can be longer than a socket's may be.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "k8s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// on are the flags for a machine and a kubelet.
func on(root string, k *kubelettest.Kubelet) []string {
	return []string{
		"--driver-root=" + root, "--sysfs-root=" + root + "/sys", "--procfs-root=" + root + "/proc",
		"--kubelet-socket=" + k.Socket(),
	}
}

const gpuResource = kubeadapter.GPUResource

func (a *testAgent) awaitHealthy(k *kubelettest.Kubelet, n int) {
	a.Helper()
	if err := k.AwaitHealthy(a.ctx, gpuResource, n); err != nil {
		a.Fatal(err)
	}
}
