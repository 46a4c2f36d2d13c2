package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
)

// process is a gpu-fleet that runs.
type process struct {
	cmd  *exec.Cmd
	log  *buffer
	url  string
	file string // its configuration
}

// buffer can be read while it is written.
type buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// unreachable is the configuration of a Nomad region and a Kubernetes cluster whose servers do not answer. It returns the file's path and the URL.
func unreachable(t *testing.T) (path, url string) {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	check.NoError(t, err)
	address := l.Addr().String()
	check.NoError(t, l.Close())
	dir := t.TempDir()
	for name, text := range map[string]string{
		"token": "secret\n",
		"kube":  `{"clusters":[{"name":"a","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"a","context":{"cluster":"a"}}],"current-context":"a"}`,
		"f.yaml": "clusters:\n  - {name: dc1, kind: nomad, address: 'http://127.0.0.1:1'}\n  - {name: east, kind: kubernetes, kubeconfig: kube}\n" +
			"ledger: {file: state/ledger.json}\ntoken_file: token\nlisten: '" + address + "'\n",
	} {
		check.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return filepath.Join(dir, "f.yaml"), "http://" + address
}

// start starts a process, and has it killed at the end of the test.
func start(t *testing.T, path, url string, args ...string) *process {
	t.Helper()
	self, err := os.Executable()
	check.NoError(t, err)
	p := &process{cmd: exec.CommandContext(t.Context(), self, append([]string{"--config", path}, args...)...), log: &buffer{}, url: url, file: path}
	p.cmd.Env, p.cmd.Stderr, p.cmd.Stdout = []string{asProgram + "=1"}, p.log, p.log
	check.NoError(t, p.cmd.Start())
	t.Cleanup(func() {
		if p.cmd.ProcessState == nil {
			_ = p.cmd.Process.Kill()
			_ = p.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("its log:\n%s", p.log)
		}
	})
	return p
}

// get is an answer of the process, and its status.
func (p *process) get(t *testing.T, path string) (status int, body string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, nil)
	check.NoError(t, err)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	check.NoError(t, err)
	return resp.StatusCode, string(text)
}

// await waits until an answer is right.
func (p *process) await(t *testing.T, path, what string, right func(status int, body string) bool) {
	t.Helper()
	var status int
	var body string
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if status, body = p.get(t, path); right(status, body) {
			return
		}
	}
	t.Fatalf("%s is not there after 30 s: %s answers %d, %s", what, path, status, body)
}

func has(part string) func(int, string) bool {
	return func(status int, body string) bool { return status == http.StatusOK && strings.Contains(body, part) }
}

// command runs a command with the configuration of the process.
func (p *process) command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return output(t, map[string]string{"USER": "ada"}, append([]string{"--config", p.file}, args...)...)
}

// A gpu-fleet whose clusters do not answer, and that has no ledger at first, runs, and shows both. Commands reach it; stop and resume need the token. A
// signal ends it as requested, and another process may lead at once.
func TestProcess(t *testing.T) {
	t.Parallel()
	path, url := unreachable(t)
	p := start(t, path, url)
	p.await(t, "/fleet.json", "that the Nomad region is unread", has("CLUSTER_UNREAD"))
	p.await(t, "/fleet.json", "that there is no ledger", has("there is no ledger"))
	host, err := os.Hostname()
	check.NoError(t, err)
	ledger := filepath.Join(filepath.Dir(path), "state", "ledger.json")
	for _, step := range []struct {
		args           []string
		code           int
		stdout, stderr string // begins with it
	}{
		{[]string{"stop", "a", "rollout"}, 1, "", "gpu-fleet: " + url + ": "}, // there is no ledger
		{[]string{"init"}, 0, "created the ledger: file " + ledger + "\n", ""},
		{[]string{"init"}, 1, "", "gpu-fleet: file " + ledger + ": there is a ledger already: nothing was changed\n"},
		{[]string{"resume"}, 0, "acts are allowed\n", ""},
		{[]string{"stop", "a", "rollout"}, 0, "all acts are stopped, by ada@" + host + ": a rollout\n", ""},
	} {
		code, stdout, stderr := p.command(t, step.args...)
		if code != step.code || !strings.HasPrefix(stdout, step.stdout) || !strings.HasPrefix(stderr, step.stderr) || (stderr != "") != (step.stderr != "") {
			t.Errorf("%q: exit code %d\n%s%s", step.args, code, stdout, stderr)
		}
	}
	p.await(t, "/fleet.json", "the stop", has("a rollout"))
	if code, out, errs := p.command(t, "stop", "--by=grace", "another"); code != 0 || !strings.Contains(out, "acts were stopped already, since ") || !strings.Contains(out, "by grace: another") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	p.await(t, "/fleet.json", "the other stop", has("grace"))
	p.tokens(t)
	p.shows(t)
	if code, out, errs := p.command(t, "resume", "--json"); code != 0 || !json.Valid([]byte(out)) || !strings.Contains(out, `"after": null`) || !strings.Contains(out, "grace") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	if code, out, errs := p.command(t, "stop", "--ledger", "--by=linus", "by hand"); code != 0 || !strings.HasPrefix(out, "all acts are stopped, by linus: by hand\n") || errs != "" {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	p.await(t, "/fleet.json", "the stop in the ledger", has("by hand"))
	if code, out, errs := p.command(t, "resume", "--ledger"); code != 0 || !strings.Contains(out, "acts are allowed again; they were stopped since ") || !strings.Contains(out, "by linus: by hand") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	p.await(t, "/readyz", "readiness", func(status int, _ string) bool { return status == http.StatusOK })
	p.ends(t, start(t, path, url))
}

// tokens shows that a stop without the token, or with another one, is refused and changes nothing.
func (p *process) tokens(t *testing.T) {
	t.Helper()
	other := filepath.Join(t.TempDir(), "token")
	check.NoError(t, os.WriteFile(other, []byte("guess"), 0o600))
	without := filepath.Join(t.TempDir(), "f.yaml")
	check.NoError(t, os.WriteFile(without, fmt.Appendf(nil, "listen: %q\n", strings.TrimPrefix(p.url, "http://")), 0o600))
	for _, args := range [][]string{{"resume", "--token-file", other}, {"resume", "--config", without}} {
		if code, out, errs := p.command(t, args...); code != 1 || out != "" || !strings.HasPrefix(errs, "gpu-fleet: "+p.url+": ") || strings.Count(errs, "\n") != 1 {
			t.Errorf("%q: %d, %s%s", args, code, out, errs)
		}
	}
	if _, body := p.get(t, "/fleet.json"); !strings.Contains(body, "grace") {
		t.Errorf("acts are allowed: %s", body)
	}
}

// shows shows that status and plan print what the process has, as text and as JSON.
func (p *process) shows(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{{"status"}, {"plan"}, {"plan", "--mode=report"}} {
		if code, out, errs := p.command(t, args...); code != 0 || !strings.Contains(out, "grace") {
			t.Errorf("%q: %d, %s%s", args, code, out, errs)
		}
		if code, out, errs := p.command(t, append(args, "--json")...); code != 0 || !json.Valid([]byte(out)) || !strings.Contains(out, "grace") {
			t.Errorf("%q --json: %d, %s%s", args, code, out, errs)
		}
	}
}

// ends shows that a second process with the ledger ends at once, and that this one ends as requested.
func (p *process) ends(t *testing.T, second *process) {
	t.Helper()
	if err := second.cmd.Wait(); err == nil || second.cmd.ProcessState.ExitCode() != 1 || !strings.Contains(second.log.String(), "another process of gpu-fleet uses the ledger") {
		t.Errorf("the second process ends with %v: %s", err, second.log)
	}
	check.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	began := time.Now()
	if err := p.cmd.Wait(); err != nil || time.Since(began) > 10*time.Second {
		t.Errorf("it ends with %v after %v", err, time.Since(began))
	}
	third := start(t, p.file, p.url)
	third.await(t, "/healthz", "the next process", func(status int, _ string) bool { return status == http.StatusOK })
	if !strings.Contains(p.log.String(), "gpu-fleet has stopped") {
		t.Errorf("its log has no end:\n%s", p.log)
	}
}
