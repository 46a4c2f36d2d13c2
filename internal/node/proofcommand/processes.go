package proofcommand

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/util/filelock"
)

// processes are those of a run: in its control group, in the session of the command, or started by one of these. Without a control group a
// process is lost that has left the session and whose parent has ended.
type processes struct {
	name   string       // of the control group
	group  string       // its folder; "" = the agent is in no control group of version 2
	leader atomic.Int64 // PID of the command, which is that of its session, too; 0 = not started
}

// process is what procfs shows of a process.
type process struct {
	pid, parent, session int
	started              string // ticks since the boot: with the PID it names one process
	zombie               bool
	group                string // its control group of version 2
}

// terminate sends SIGTERM to the process group of the command, which is not reaped so far.
func (p *processes) terminate() { _ = unix.Kill(-int(p.leader.Load()), unix.SIGTERM) }

// kill sends SIGKILL to all. The control group also has those that are started meanwhile.
func (p *processes) kill() {
	if p.group != "" {
		_ = os.WriteFile(filepath.Join(p.group, "cgroup.kill"), []byte("1"), 0) // of Linux 5.14
	}
	for _, m := range p.members() {
		if !m.zombie {
			m.kill()
		}
	}
}

// kill sends SIGKILL to this process, and not to another one that has got its PID.
func (m process) kill() {
	handle, err := os.FindProcess(m.pid)
	if err != nil {
		return
	}
	defer func() { _ = handle.Release() }()
	if now, ok := readProcess(m.pid); ok && now.started == m.started {
		_ = handle.Signal(unix.SIGKILL)
	}
}

// end kills all until none runs, and returns the PIDs of those that still run after some time.
func (p *processes) end(kill func(*processes), atMost time.Duration) (left []int) {
	const longest = 100 * time.Millisecond // between two looks: each one reads all of procfs
	deadline := time.Now().Add(atMost)
	for pause := time.Millisecond; ; pause = min(2*pause, longest) {
		if left = p.reap(); len(left) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return left
		}
		kill(p)
		<-time.After(pause)
	}
}

// reap returns the PIDs that run, and reaps those that have ended and whose parent is the agent now: as the first process of a container it
// is the parent of all orphans. The command itself is left to its Wait.
func (p *processes) reap() (running []int) {
	for _, m := range p.members() {
		switch {
		case !m.zombie:
			running = append(running, m.pid)
		case m.parent == os.Getpid() && m.pid != int(p.leader.Load()):
			_, _ = unix.Wait4(m.pid, nil, unix.WNOHANG, nil)
		}
	}
	return running
}

func (p *processes) members() []process {
	var members []process
	all := readProcesses()
	for leader := int(p.leader.Load()); ; {
		n := len(members)
		all = slices.DeleteFunc(all, func(o process) bool {
			isMember := leader != 0 && o.session == leader || strings.HasSuffix(o.group, "/"+p.name) ||
				slices.ContainsFunc(members, func(m process) bool { return m.pid == o.parent })
			if isMember {
				members = append(members, o)
			}
			return isMember
		})
		if len(members) == n { // else children of the new ones are looked for
			return members
		}
	}
}

func readProcesses() []process {
	var all []process
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, ok := readProcess(pid); ok {
				all = append(all, p)
			}
		}
	}
	return all
}

// readProcess reads proc_pid_stat(5), of which the second field may contain anything. It reads no file that waits for the memory of the process,
// as its command line does: that can hang with it.
func readProcess(pid int) (process, bool) {
	folder := filepath.Join("/proc", strconv.Itoa(pid))
	text, err := os.ReadFile(filepath.Join(folder, "stat"))
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if err != nil || len(fields) < 20 {
		return process{}, false
	}
	parent, err := strconv.Atoi(fields[1])
	session, err2 := strconv.Atoi(fields[3])
	groups, _ := os.ReadFile(filepath.Join(folder, "cgroup"))
	p := process{pid: pid, parent: parent, session: session, started: fields[19], zombie: fields[0] == "Z" || fields[0] == "X", group: unified(groups)}
	return p, errors.Join(err, err2) == nil
}

// unified is the control group of version 2 in a file of procfs; "" = none.
func unified(groups []byte) string {
	for line := range strings.Lines(string(groups)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSuffix(strings.TrimSuffix(path, "\n"), " (deleted)")
		}
	}
	return ""
}

// ownGroup is the folder of the agent's control group of version 2; "" = there is none that this process sees.
func ownGroup() string {
	groups, _ := os.ReadFile("/proc/self/cgroup")
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	return groupFolder(unified(groups), string(mounts))
}

// groupFolder is where a control group is mounted, by proc_pid_mountinfo(5).
func groupFolder(group, mounts string) string {
	for line := range strings.Lines(mounts) {
		mount, system, _ := strings.Cut(line, " - ")
		fields := strings.Fields(mount)
		if group == "" || len(fields) < 5 || !strings.HasPrefix(system, "cgroup2 ") || strings.HasPrefix(group, "/..") ||
			strings.HasPrefix(fields[3], "/..") { // outside of this process's cgroup namespace
			continue
		}
		below, err := filepath.Rel(fields[3], group)
		if err == nil && filepath.IsLocal(below) {
			return filepath.Join(fields[4], below)
		}
	}
	return ""
}

func groupPath(parent, name string) string {
	if parent == "" {
		return ""
	}
	return filepath.Join(parent, name)
}

// makeGroup makes the control group and opens it. Where the agent may not, there is an error.
func (p *processes) makeGroup() (*os.File, error) {
	if p.group == "" {
		return nil, os.ErrNotExist
	}
	if err := os.Mkdir(p.group, 0o755); err != nil {
		return nil, err
	}
	return os.Open(p.group)
}

// removeGroup removes the control group, if there is one. With processes in it that fails.
func (p *processes) removeGroup() error {
	if _, err := os.Lstat(p.group); err != nil { // on a file system that is mounted read-only, removing what is missing fails otherwise
		return nil //nolint:nilerr // there is none
	}
	const longest = 100 * time.Millisecond
	for pause := time.Millisecond; ; pause *= 2 {
		err := os.Remove(p.group)
		if !errors.Is(err, unix.EBUSY) || pause > longest {
			return err
		}
		<-time.After(pause) // the kernel takes a process out of its group after it has shown its end
	}
}

// CleanUp ends what runs of an earlier life of the agent have left, and removes their files below the folder of Proof. Runs that last are left
// alone, also those of another agent.
func CleanUp(folder string) error { return standard.cleanUp(folder) }

func (r runner) cleanUp(folder string) error {
	locks, err := filepath.Glob(filepath.Join(folder, "*"+lockSuffix))
	errs := []error{err}
	for _, path := range locks {
		name := strings.TrimSuffix(filepath.Base(path), lockSuffix)
		lock, err := filelock.Take(path)
		if errors.Is(err, filelock.ErrHeld) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		p := processes{name: name, group: groupPath(r.groups(), name)}
		if left := p.end(r.kill, r.killWait); len(left) > 0 {
			errs = append(errs, fmt.Errorf("processes of an earlier life of this agent can't be killed: PIDs %v", left))
		}
		f := files{folder: folder, name: name, lock: lock}
		f.remove(p.removeGroup())
	}
	return errors.Join(errs...)
}
