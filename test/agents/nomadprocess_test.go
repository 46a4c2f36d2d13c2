package agents

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// asNomadAgent is in the environment of a process of this test program that is a Nomad agent: the path of the plugin. The config
// block of the plugin is in stdin, as lines "key=value"; without one, the plugin is not configured.
const asNomadAgent = "TANDEM_TEST_NOMAD_AGENT"

// runAsNomadAgent starts the plugin, opens its streams, prints its PID, and waits to be killed.
func runAsNomadAgent(binary string) error {
	settings := map[string]any{}
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), "=")
		settings[key] = value
	}
	cmd := exec.Command(binary)
	p, err := nomadtest.Dispense(nomadtest.NewClient(cmd, hclog.NewNullLogger()))
	if err != nil {
		return err
	}
	if len(settings) > 0 {
		if err := nomadtest.SetConfig(p, settings); err != nil {
			return err
		}
		lists, err := p.Fingerprint(context.Background())
		if err != nil {
			return err
		}
		statistics, err := p.Stats(context.Background(), time.Second)
		if err != nil {
			return err
		}
		go func() {
			for range lists {
			}
		}()
		go func() {
			for range statistics {
			}
		}()
	}
	fmt.Println(cmd.Process.Pid)
	select {}
}

// The Nomad agent is killed. Whatever it is doing, its plugin ends, too, and removes its sockets, although what it logs has no reader.
func TestNomadAgentIsKilled(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ before, after string }{ // calls that hang
		"not configured": {}, "healthy": {}, "nvmlInit hangs": {before: "nvmlInit"}, "everything hangs": {after: "*"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAgent(t, nomadGPU, "h100x8", nil)
			if tc.before != "" {
				a.must(a.driver.Hang(simdriver.All, tc.before))
			}
			parent, pid := a.startNomadAgent(name != "not configured")
			within := timeout
			if name == "not configured" {
				within = 5 * time.Second
				a.await("the socket", func() bool { return len(entries(t, a.tmp())) > 0 })
			} else {
				a.awaitSocket()
			}
			if name == "healthy" {
				a.await("a reading", func() bool { // an earlier event would be lost
					calls, err := a.driver.Calls()
					return err == nil && calls["nvmlEventSetWait_v2"] > 0
				})
				a.xid(1, 95)
				a.awaitFile(a.history(), `"Code": 95`)
			}
			if tc.after != "" {
				a.must(a.driver.Hang(simdriver.All, tc.after))
			}
			a.must(parent.Process.Kill())
			_ = parent.Wait() // killed
			began := time.Now()
			a.await("the end of the plugin", func() bool { // a zombie that has no parent has ended
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				return err != nil || strings.Contains(string(stat), ") Z ")
			})
			if took := time.Since(began); took > within {
				t.Errorf("the end took %v", took)
			}
			if left := entries(t, a.tmp()); len(left) > 0 {
				t.Errorf("left in TMPDIR: %v", left)
			}
			if _, err := os.Stat(a.socket()); err == nil {
				t.Error("the control socket is left")
			}
		})
	}
}

// startNomadAgent starts a process that is a Nomad agent, and returns it with the PID of its plugin.
func (a *agent) startNomadAgent(configured bool) (parent *exec.Cmd, pid int) {
	a.Helper()
	parent = exec.Command(os.Args[0])
	parent.Env = slices.Concat(a.env, []string{asNomadAgent + "=" + a.binary})
	parent.Stderr = os.Stderr
	var block strings.Builder
	for key, value := range a.settings {
		if configured {
			fmt.Fprintf(&block, "%s=%v\n", key, value)
		}
	}
	parent.Stdin = strings.NewReader(block.String())
	out, err := parent.StdoutPipe()
	a.must(err, parent.Start())
	a.Cleanup(func() {
		_ = parent.Process.Kill()
		_ = parent.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	a.must(err)
	_, err = fmt.Sscan(line, &pid)
	a.must(err)
	return parent, pid
}

// socketDirs is the prefix of the folders in which each process has its socket; the PID follows.
const socketDirs = "nomad-gpu-"

// A killed process leaves its socket; the next one removes it, and nothing else.
func TestSocketsOfKilledProcessesAreRemoved(t *testing.T) {
	t.Parallel()
	a := newAgent(t, nomadGPU, "t4", nil)
	ended := exec.Command("true")
	a.must(ended.Run())
	pid := strconv.Itoa(ended.Process.Pid)
	used := socketDirs + "2000000000" // no PID is so large (proc(5), pid_max), but the folder has another file
	want := []string{socketDirs + "1", socketDirs + pid + "-mine", used, "plugin1"}
	for _, dir := range []string{socketDirs + pid, want[0], want[1], used, "."} {
		dir = filepath.Join(a.tmp(), dir)
		a.must(os.MkdirAll(dir, 0o700))
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "plugin1"), Net: "unix"})
		a.must(err)
		l.SetUnlinkOnClose(false)
		a.must(l.Close())
	}
	a.must(os.WriteFile(filepath.Join(a.tmp(), used, "notes"), nil, 0o600))
	a.launch()
	own := socketDirs + strconv.Itoa(a.cmd.Process.Pid)
	want = append(want, own)
	slices.Sort(want)
	if got := entries(t, a.tmp()); !slices.Equal(got, want) {
		t.Errorf("there is %v, want %v", got, want)
	}
	if got := entries(t, filepath.Join(a.tmp(), used)); !slices.Equal(got, []string{"notes"}) {
		t.Errorf("in a folder that is used: %v", got)
	}
	a.client.Kill()
	if got := entries(t, a.tmp()); slices.Contains(got, own) {
		t.Errorf("left: %s", own)
	}
}

// Where the path would be too long for a socket, or a group shall have access, the socket is where go-plugin puts it.
func TestSocketsElsewhere(t *testing.T) {
	t.Parallel()
	long, other := coretest.ShortDir(t), coretest.ShortDir(t)
	for name, tc := range map[string]struct {
		tmp string
		env []string
		dir string // of the socket
	}{
		"a long path":   {tmp: filepath.Join(long, strings.Repeat("x", 87-len(long)))}, // of the same length whatever TMPDIR is
		"a group":       {tmp: coretest.ShortDir(t), env: []string{plugin.EnvUnixSocketGroup + "=" + strconv.Itoa(os.Getgid())}},
		"Nomad's place": {tmp: "/nowhere", env: []string{plugin.EnvUnixSocketDir + "=" + other}, dir: other},
	} {
		t.Run(name, func(t *testing.T) {
			a, dir := newAgent(t, nomadGPU, "t4", nil), tc.dir
			if dir == "" {
				dir = tc.tmp
				a.must(os.MkdirAll(dir, 0o700))
			}
			a.env = append(append(a.env, "TMPDIR="+tc.tmp), tc.env...)
			a.launch()
			if n := len(entries(t, dir)); n != 1 {
				t.Errorf("%d entries, want the socket or its folder", n)
			}
			a.client.Kill()
			if left := entries(t, dir); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
		})
	}
}
