package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/hashicorp/go-plugin"
)

// socketDirs is the prefix of the folders in which each process has its socket; the pid follows.
const socketDirs = "nomad-gpu-"

// A killed process leaves its socket; the next removes it, and nothing else.
func TestSocketsOfTheKilledAreSwept(t *testing.T) {
	m, dir, tmp := install(t, "t4"), shortDir(t), shortDir(t)
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	pid := strconv.Itoa(dead.Process.Pid)
	socket := func(dir string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(tmp, dir), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(tmp, dir, "plugin1"), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	socket(socketDirs + pid)
	socket(socketDirs + "1")           // of a process that lives
	socket(socketDirs + pid + "-mine") // of somebody else
	socket(".")                        // of another plugin of Nomad's
	used := socketDirs + "2000000000"  // no pid is so large (proc(5), pid_max), but somebody uses the folder
	socket(used)
	if err := os.WriteFile(filepath.Join(tmp, used, "notes"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", tmp)
	p := &plug{machine: m, dir: dir}
	p.DevicePlugin, p.client, p.cmd = start(t)
	own := socketDirs + strconv.Itoa(p.cmd.Process.Pid)
	want := []string{socketDirs + "1", used, own, socketDirs + pid + "-mine", "plugin1"}
	slices.Sort(want)
	if got := entries(t, tmp); !slices.Equal(got, want) {
		t.Errorf("there is %v, want %v", got, want)
	}
	if got := entries(t, filepath.Join(tmp, used)); !slices.Equal(got, []string{"notes"}) {
		t.Errorf("in a folder that is used: %v", got)
	}
	p.client.Kill()
	if got := entries(t, tmp); slices.Contains(got, own) {
		t.Errorf("left behind: %s", own)
	}
}

// Where the path would be too long for a socket, or a group shall reach it, it is where go-plugin puts it.
func TestSocketWhereItFits(t *testing.T) {
	long := shortDir(t)
	for name, env := range map[string]map[string]string{
		"a long path":   {"TMPDIR": filepath.Join(long, strings.Repeat("x", 87-len(long)))}, // its length does not depend on this test's TMPDIR
		"a group":       {"TMPDIR": shortDir(t), plugin.EnvUnixSocketGroup: strconv.Itoa(os.Getgid())},
		"Nomad's place": {"TMPDIR": "/nowhere", plugin.EnvUnixSocketDir: shortDir(t)},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range env {
				t.Setenv(k, v)
			}
			dir := env["TMPDIR"]
			if d := env[plugin.EnvUnixSocketDir]; d != "" {
				dir = d
			}
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			_, client, _ := start(t)
			if n := len(entries(t, dir)); n != 1 {
				t.Errorf("%d entries, want the socket or its folder", n)
			}
			client.Kill()
			if left := entries(t, dir); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}
