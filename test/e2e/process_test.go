//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// errEnded is the error of a program that ended unexpectedly: waits for it end immediately.
var errEnded = errors.New("ended")

// process is a program in the background. Its output is appended to logs/<name>.log, so that a restarted
// program keeps one log.
type process struct {
	name   string
	cmd    *exec.Cmd
	exited chan struct{} // closed after the program ended
}

// start runs argv in the background until the test ends. Its environment is this process's and env.
func start(t *testing.T, name string, env []string, argv ...string) *process {
	t.Helper()
	log, err := os.OpenFile(logPath(name), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the program has its own copy
	p := &process{name: name, cmd: exec.CommandContext(t.Context(), argv[0], argv[1:]...), exited: make(chan struct{})}
	p.cmd.Dir, p.cmd.Env = stateDir(), append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // the status is in ProcessState
		close(p.exited)
	}()
	t.Cleanup(func() { <-p.exited }) // the test's context is over by then, which kills the program
	return p
}

// stop sends the signal and waits for the end; it does nothing to a program that has ended.
func (p *process) stop(t *testing.T, signal syscall.Signal) {
	t.Helper()
	_ = p.cmd.Process.Signal(signal) // fails only when it has ended
	p.awaitEnd(t)
}

// awaitEnd waits until the program has ended.
func (p *process) awaitEnd(t *testing.T) {
	t.Helper()
	select {
	case <-p.exited:
	case <-time.After(30 * time.Second):
		t.Fatalf("%s still runs after 30 s", p.name)
	}
}

// alive reports a program that ended, as errEnded.
func (p *process) alive() error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s %w: %v; its log ends in\n%s", p.name, errEnded, p.cmd.ProcessState, tail(logPath(p.name), 15))
	default:
		return nil
	}
}

// running returns the processes of the named program, each with its parent, but those of the command mps-daemon.
func running(program string) map[int]int {
	parents := map[int]int{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range stats {
		var pid, parent int
		var name, state string
		text, _ := os.ReadFile(file) // gone meanwhile: an empty line that does not parse
		if n, _ := fmt.Sscan(string(text), &pid, &name, &state, &parent); n != 4 || name != "("+program+")" || state == "Z" {
			continue
		}
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		if !bytes.Contains(line, []byte("\x00mps-daemon\x00")) && !bytes.Contains(line, []byte("\x00reset-server\x00")) { // of k8s-gpu, and no agents
			parents[pid] = parent
		}
	}
	return parents
}

// commandLimit bounds one question to an orchestrator; importing an image takes the longest.
const commandLimit = time.Minute

// selfSigned is for the APIs of the orchestrators, whose certificates are that.
var selfSigned = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}

var client = &http.Client{Transport: nomadOperator{selfSigned}}

// fetch returns the body of a page.
func fetch(url string) (string, error) { return request(http.MethodGet, url, "", nil) }

// request makes one request, and returns the body of the answer. An answer other than success is a statusError. The token is that of
// testdata/tokens.csv; servers without authentication ignore it.
func request(method, url, kind string, body []byte) (string, error) {
	return requestAs("admin", method, url, kind, body)
}

// requestAs is request with a token.
func requestAs(token, method, url, kind string, body []byte) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", kind)
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode/100 != 2 {
		err = &statusError{answer.StatusCode, fmt.Sprintf("%s %s: %s: %s", method, url, answer.Status, text)}
	}
	return string(text), err
}

type statusError struct {
	code int
	text string
}

func (e *statusError) Error() string { return e.text }

// hasStatus reports whether a server answered with this status.
func hasStatus(err error, code int) bool {
	status, ok := errors.AsType[*statusError](err)
	return ok && status.code == code
}

// send makes a request with an object as JSON.
func send(method, url string, object any) error {
	text, err := json.Marshal(object)
	if err == nil {
		_, err = request(method, url, "application/json", text)
	}
	return err
}

// fetchJSON reads what a page that answers with status 200 holds.
func fetchJSON(url string, into any) error {
	body, err := fetch(url)
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(body), into)
}

// command runs argv to its end and gives its output without the final newline.
func command(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSuffix(string(out), "\n"), err
}

// try is command for what only its failure matters of.
func try(argv ...string) error {
	_, err := command(argv...)
	return err
}

// must is command for what has to work.
func must(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := command(argv...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// await asks until the answer is nil. It fails the test with the last answer after the given time, or at
// once when a program ended.
func await(t *testing.T, what string, limit time.Duration, ask func() error) {
	t.Helper()
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) || errors.Is(err, errEnded) {
			t.Fatalf("waited at most %v for %s: %v", limit, what, err)
		}
		<-tick.C
	}
}

func stateDir() string           { return filepath.Join(os.Getenv("E2E_DIR"), "state") }
func logDir() string             { return filepath.Join(os.Getenv("E2E_DIR"), "logs") }
func logPath(name string) string { return filepath.Join(logDir(), name+".log") }

// readLog returns what a program has printed so far.
func readLog(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(logPath(name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// tail returns the last n lines of a file.
func tail(path string, n int) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// lineWith returns the first line that holds the text.
func lineWith(text, wanted string) (string, bool) {
	for line := range strings.Lines(text) {
		if strings.Contains(line, wanted) {
			return strings.TrimSpace(line), true
		}
	}
	return "", false
}

// render copies testdata/<name> into the state folder, with every @KEY@ replaced, and returns its path.
func render(t *testing.T, name string, values map[string]string) string {
	t.Helper()
	return renderIn(t, stateDir(), name, values)
}

// renderIn is render for the state folder of another node.
func renderIn(t *testing.T, dir, name string, values map[string]string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range values {
		text = bytes.ReplaceAll(text, []byte("@"+key+"@"), []byte(value))
	}
	return writeIn(t, dir, name, text)
}

func write(t *testing.T, name string, data []byte) string {
	t.Helper()
	return writeIn(t, stateDir(), name, data)
}

func writeIn(t *testing.T, dir, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
