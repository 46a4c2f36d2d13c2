//go:build packages

package packages

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// machine is a Debian of its own with systemd as process 1, without a network.
type machine struct {
	leader string // its process 1, as the test sees it
}

// newDebian returns a root file system like that of -debian, whose changes end with the test.
func newDebian(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	for _, dir := range []string{"root", "changes", "work"} {
		if err := os.Mkdir(filepath.Join(folder, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	root := folder + "/root"
	run(t, "mount", "-t", "overlay", "packages", root, "-o", "lowerdir="+*debian+",upperdir="+folder+"/changes,workdir="+folder+"/work")
	t.Cleanup(func() { run(t, "umount", "--lazy", root) })
	return root
}

// boot starts a machine with a root file system; it ends with the test.
func boot(t *testing.T, root string) *machine {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), "console"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("systemd-nspawn", "--directory="+root, "--machine=packages", "--register=no", "--keep-unit", "--boot", "--private-network",
		"--capability=CAP_SYSLOG", "--console=pipe", "--quiet")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	m := &machine{}
	t.Cleanup(func() {
		if m.leader != "" {
			_, _ = m.try("systemctl", "poweroff", "--force", "--force")
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("console of the machine:\n%s", text)
		}
	})
	await(t, "the machine to have started", func() error {
		children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", cmd.Process.Pid, cmd.Process.Pid))
		if err != nil {
			return err
		}
		if m.leader = strings.TrimSpace(string(children)); m.leader == "" {
			return fmt.Errorf("systemd-nspawn has no child")
		}
		if out, _ := m.try("systemctl", "is-system-running"); out != "running" {
			return fmt.Errorf("it is %s", out)
		}
		return nil
	})
	return m
}

// try runs a command on the machine.
func (m *machine) try(argv ...string) (string, error) {
	argv = append([]string{"--target", m.leader, "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--"}, argv...)
	out, err := exec.Command("nsenter", argv...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (m *machine) run(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := m.try(argv...)
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return out
}

// at is where the test sees a file of the machine, also one in a file system that the machine has mounted.
func (m *machine) at(path string) string { return "/proc/" + m.leader + "/root" + path }

// install gives the machine packages, and returns what dpkg printed.
func (m *machine) install(t *testing.T, files ...string) string {
	t.Helper()
	argv := []string{"dpkg", "--install"}
	for _, file := range files {
		run(t, "cp", file, m.at("/root/"))
		argv = append(argv, "/root/"+filepath.Base(file))
	}
	return m.run(t, argv...)
}

// unit is a property of a unit.
func (m *machine) unit(t *testing.T, property, unit string) string {
	t.Helper()
	return m.run(t, "systemctl", "show", "--value", "--property="+property, unit)
}

func (m *machine) exists(path string) bool {
	_, err := os.Lstat(m.at(path))
	return err == nil
}

// write replaces a file of the machine.
func (m *machine) write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(m.at(path)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(m.at(path), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// edit appends a line to a file of the machine.
func (m *machine) edit(t *testing.T, path, line string) {
	t.Helper()
	text, err := os.ReadFile(m.at(path))
	if err != nil {
		t.Fatal(err)
	}
	m.write(t, path, string(text)+line+"\n")
}

func (m *machine) checkLine(t *testing.T, path, line string) {
	t.Helper()
	text, err := os.ReadFile(m.at(path))
	if err != nil || !strings.HasSuffix(string(text), "\n"+line+"\n") {
		t.Errorf("%s (%v) does not end in %q", path, err, line)
	}
}

func (m *machine) checkExists(t *testing.T, want bool, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if m.exists(path) != want {
			t.Errorf("%s exists: %v, want %v", path, !want, want)
		}
	}
}

// await asks until the answer is nil.
func await(t *testing.T, what string, ask func() error) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute for %s: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}
