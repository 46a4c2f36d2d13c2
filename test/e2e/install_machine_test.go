//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// The versions of the files in $E2E_SHIPPED, which ./run has built.
var version, nextVersion = os.Getenv("E2E_VERSION"), os.Getenv("E2E_NEXT")

// releaseFolder has the files of a release on the machine.
const releaseFolder = "/root/release"

// freshMachine is a Debian of its own with systemd as process 1: what ./fresh has made, and changes that end with the test. Its network is that
// of the sandbox.
type freshMachine struct {
	*process
	root   string
	pid    string // of its process 1, as the test sees it
	driver *simdriver.Machine
}

// bootFresh starts a machine on which the simulated driver is installed where the packages of a driver install theirs. prepare may change
// its files before; options are those of systemd-nspawn.
func bootFresh(t *testing.T, prepare func(root string), options ...string) *freshMachine {
	t.Helper()
	m := &freshMachine{root: filepath.Join(stateDir(), "fresh")}
	over := filepath.Join(stateDir(), "fresh-changes")
	for _, dir := range []string{m.root, over + "/upper", over + "/work"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	must(t, "mount", "-t", "overlay", "fresh", m.root,
		"-o", "lowerdir="+os.Getenv("E2E_FRESH")+",upperdir="+over+"/upper,workdir="+over+"/work")
	var err error
	if m.driver, err = simdriver.Install(t.Context(), m.root+"/srv/driver", "h100x8"); err != nil {
		t.Fatal(err)
	}
	script, err := os.ReadFile("testdata/driver")
	if err == nil {
		err = os.WriteFile(m.root+"/srv/driver/install", script, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	prepare(m.root)
	argv := append([]string{"testdata/machine", "systemd-nspawn", "--directory=" + m.root, "--machine=fresh", "--register=no", "--keep-unit",
		"--boot", "--resolv-conf=off", "--timezone=off", "--kill-signal=SIGRTMIN+3",
		"--capability=all", "--system-call-filter=@keyring bpf"}, options...)
	argv[0], err = filepath.Abs(argv[0])
	if err != nil {
		t.Fatal(err)
	}
	m.process = start(t, "machine", nil, argv...)
	await(t, "systemd", 60*time.Second, func() error { return errors.Join(m.booted(), m.alive()) })
	m.shell().must(t, "sh /srv/driver/install")
	return m
}

// booted is nil when systemd has started everything.
func (m *freshMachine) booted() error {
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", m.cmd.Process.Pid))
	if m.pid = strings.TrimSpace(string(children)); err != nil || m.pid == "" {
		return errors.Join(err, errors.New("there is no process 1 yet"))
	}
	state, err := m.shell()("systemctl is-system-running --wait")
	if err != nil {
		err = fmt.Errorf("%w: it is %s", err, state)
	}
	return err
}

// shell runs lines as root's shell on the machine does, in the folder that has the files of a release.
func (m *freshMachine) shell() shell {
	return typed(releaseFolder, nil, "nsenter", "--all", "--target="+m.pid, "/usr/bin/env", "-i", "HOME=/root", "TERM=dumb", "LC_ALL=C.UTF-8",
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}

// files returns which of these files and folders the machine has.
func (m *freshMachine) files(paths ...string) (there []string) {
	for _, path := range paths {
		if _, err := os.Lstat(filepath.Join(m.root, path)); err == nil {
			there = append(there, path)
		}
	}
	return there
}
