package proofcommand

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

// agentFolder has the folder of a test binary that is called as an agent: it makes one run, prints the result, and ends.
const agentFolder = "TANDEM_TEST_PROOF_FOLDER"

func TestMain(m *testing.M) {
	if folder := os.Getenv(agentFolder); folder != "" {
		result := Run(context.Background(), proof(folder, os.Args[1], os.Args[2:]...))
		_ = json.NewEncoder(os.Stdout).Encode(result)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// proof is one of a script, which has its arguments as $1, $2 ...
func proof(folder, script string, args ...string) Proof {
	return Proof{Command: append([]string{"/bin/sh", "-c", script, "sh"}, args...), GPU: "GPU-a", Reason: "boot", Timeout: time.Minute, Folder: folder}
}

// rig is a node of one test: a runner, and the folder of its runs.
type rig struct {
	*testing.T
	runner
	folder string
}

// newRig has a runner whose waits are short.
func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t, standard, filepath.Join(t.TempDir(), "proof")}
	r.termWait, r.killWait = 20*time.Millisecond, 20*time.Second // of the latter it only needs a part
	return r
}

// bothWays runs a test with a control group, where this process may make one, and without.
func bothWays(t *testing.T, f func(*rig)) {
	t.Helper()
	t.Run("control group", func(t *testing.T) {
		r := newRig(t)
		r.needGroup()
		f(r)
		r.noneLeft()
	})
	t.Run("no control group", func(t *testing.T) {
		r := newRig(t)
		r.groups = func() string { return "" }
		f(r)
		r.noneLeft()
	})
}

// needGroup skips a test where this process may make no control group.
func (r *rig) needGroup() {
	r.Helper()
	p := processes{group: groupPath(r.groups(), newName())}
	f, err := p.makeGroup()
	if err != nil {
		r.Skipf("no control group can be made: %v", err)
	}
	check.NoError(r, f.Close(), p.removeGroup())
}

func (r *rig) script(text string, args ...string) Result {
	return r.run(r.Context(), proof(r.folder, text, args...))
}

// noneLeft checks that the runs have left no file and no control group.
func (r *rig) noneLeft() {
	r.Helper()
	if left, _ := filepath.Glob(filepath.Join(r.folder, "*")); len(left) > 0 {
		r.Errorf("files are left: %v", left)
	}
}

// awaitPIDs waits until a file has n lines, each with the PID of a process that has written it.
func awaitPIDs(t *testing.T, file string, n int) (pids []int) {
	t.Helper()
	check.Until(t, "the processes of the command run", func() bool {
		text, _ := os.ReadFile(file)
		pids = nil
		for line := range strings.Lines(string(text)) {
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			check.NoError(t, err)
			pids = append(pids, pid)
		}
		return len(pids) == n
	})
	return pids
}

func running(pid int) bool {
	p, ok := readProcess(pid)
	return ok && !p.zombie
}

// ends returns a function that waits for at most some time until a process has ended.
func ends(t *testing.T, pid int) func(time.Duration) bool {
	t.Helper()
	fd, err := unix.PidfdOpen(pid, 0)
	check.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	return func(atMost time.Duration) bool {
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(atMost.Milliseconds()))
			if !errors.Is(err, unix.EINTR) {
				return n == 1
			}
		}
	}
}

// Case 3.
func TestOnlyExitStatus1IsAVerdictOfFailure(t *testing.T) {
	for _, c := range []struct {
		script  string
		outcome Outcome
		cause   Cause
	}{
		{"exit 0", Passed, NoCause},
		{"exit 1", Failed, NoCause},
		{"exit 2", CouldNotRun, Reported},
		{"exit 3", CouldNotRun, OtherStatus},
		{"exit 127", CouldNotRun, OtherStatus},
		{"exit 255", CouldNotRun, OtherStatus},
		{"kill -SEGV $$", CouldNotRun, Signal},
		{"kill -TERM $$", CouldNotRun, Signal},
		{"kill -KILL $$", CouldNotRun, Signal},
	} {
		bothWays(t, func(r *rig) {
			if got := r.script(c.script); got.Outcome != c.outcome || got.Cause != c.cause || got.Text == "" || got.Left != nil {
				r.Errorf("%s: %+v", c.script, got)
			}
		})
	}
}

// Case 3.
func TestTimeoutIsNoVerdict(t *testing.T) {
	bothWays(t, func(r *rig) {
		for _, script := range []string{"sleep 1000", `trap "exit 1" TERM; while :; do sleep 0.01; done`, `trap "" TERM; while :; do sleep 0.01; done`} {
			p := proof(r.folder, script)
			p.Timeout = 50 * time.Millisecond
			if got := r.run(r.Context(), p); got.Outcome != CouldNotRun || got.Cause != Timeout || got.Duration < p.Timeout || got.Left != nil {
				r.Errorf("%s: %+v", script, got)
			}
		}
	})
}

// Cases 3 and 4.
func TestProgramThatCannotBeStarted(t *testing.T) {
	dir := t.TempDir()
	text, other := filepath.Join(dir, "text"), filepath.Join(dir, "other")
	check.NoError(t, os.WriteFile(text, []byte("no program"), 0o755), os.WriteFile(other, []byte("#!/no/such/shell\n"), 0o755))
	unchecked := func(r *rig) { r.check = func([]string) error { return nil } }
	for name, c := range map[string]struct {
		command []string
		with    func(*rig)
		cause   Cause
	}{
		"missing":              {[]string{"/no/such/program"}, nil, ProgramMissing},
		"by PATH":              {[]string{"sh"}, nil, ProgramRefused},
		"no command":           {nil, nil, ProgramRefused},
		"no program":           {[]string{"/etc/passwd"}, nil, ProgramRefused},
		"neither ELF nor text": {[]string{text}, unchecked, NotStarted},
		"without its shell":    {[]string{other}, unchecked, NotStarted},
		"no working folder":    {[]string{"/bin/sh"}, func(r *rig) { r.folder = text }, NotStarted},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			if c.with != nil {
				c.with(r)
			}
			got := r.run(t.Context(), Proof{Command: c.command, Timeout: time.Minute, Folder: r.folder})
			if got.Outcome != CouldNotRun || got.Cause != c.cause || got.Text == "" || strings.Contains(got.Text, "\n") {
				t.Errorf("%+v", got)
			}
			if r.folder != text {
				r.noneLeft()
			}
		})
	}
}

func TestCancelled(t *testing.T) {
	bothWays(t, func(r *rig) {
		pids := filepath.Join(r.TempDir(), "pids")
		ctx, cancel := context.WithCancelCause(r.Context())
		go func() {
			awaitPIDs(r.T, pids, 1)
			cancel(errors.New("the agent ends"))
		}()
		got := r.run(ctx, proof(r.folder, `trap "exit 1" TERM; echo $$ >"$1"; while :; do sleep 0.01; done`, pids))
		if got.Outcome != Cancelled || got.Cause != NoCause || got.Text != "cancelled: the agent ends" {
			r.Errorf("%+v", got)
		}
		if got = r.run(ctx, proof(r.folder, "sleep 1000")); got.Outcome != Cancelled {
			r.Errorf("cancelled before the start: %+v", got)
		}
	})
}

// Case 11.
func TestChildThatForksAndIgnoresTermIsKilled(t *testing.T) {
	const child = `trap "" TERM; echo $$ >>"$1"; while :; do sleep 1000; done`
	bothWays(t, func(r *rig) {
		file := filepath.Join(r.TempDir(), "pids")
		ctx, cancel := context.WithCancel(r.Context())
		var pids []int
		go func() {
			pids = awaitPIDs(r.T, file, 3)
			cancel()
		}()
		got := r.run(ctx, proof(r.folder, `sh -c "$2" sh "$1" & setsid sh -c "$2" sh "$1" & eval "$2"`, file, child))
		if got.Outcome != Cancelled || got.Left != nil || slices.ContainsFunc(pids, running) {
			r.Errorf("%+v, processes %v", got, pids)
		}
	})
}

// A process whose parent has ended, in a session of its own, is found by the control group only.
func TestWhatTheCommandLeavesIsKilled(t *testing.T) {
	const orphan = `(%s sh -c 'trap "" TERM HUP; echo $$ >"$1"; exec sleep 1000' sh "$1" &); while [ ! -s "$1" ]; do sleep 0.01; done; exit %d`
	for _, c := range []struct {
		in      string
		status  int
		outcome Outcome
	}{{"", 0, Passed}, {"", 1, Failed}, {"setsid", 0, Passed}} {
		bothWays(t, func(r *rig) {
			if c.in != "" && r.groups() == "" {
				r.Skip("it can't be found")
			}
			file := filepath.Join(r.TempDir(), "pids")
			got := r.script(fmt.Sprintf(orphan, c.in, c.status), file)
			if pids := awaitPIDs(r.T, file, 1); got.Outcome != c.outcome || got.Left != nil || running(pids[0]) {
				r.Errorf("%+v, process %v", got, pids)
			}
		})
	}
}

// Case 12.
func TestProcessThatCannotBeKilled(t *testing.T) {
	if most := standard.termWait + standard.killWait + 2*standard.outputMax; most > 9*time.Second {
		t.Errorf("a run returns %v after its timeout, and 10 s are promised", most)
	}
	bothWays(t, func(r *rig) {
		stuck := *r
		stuck.kill, stuck.killWait, stuck.outputMax = func(*processes) {}, 20*time.Millisecond, 20*time.Millisecond // as in state D
		file := filepath.Join(r.TempDir(), "pids")
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		go func() {
			awaitPIDs(r.T, file, 1)
			cancel()
		}()
		got := stuck.run(ctx, proof(r.folder, `trap "" TERM; echo $$ >"$1"; while :; do read x <"$2"; done`, file, r.fifo()))
		pids := awaitPIDs(r.T, file, 1)
		if got.Outcome != Cancelled || !slices.Equal(got.Left, pids) {
			r.Errorf("%+v, processes %v", got, pids)
		}
		if other := r.script("exit 0"); other.Outcome != Passed {
			r.Errorf("another GPU meanwhile: %+v", other)
		}
		check.NoError(r, syscall.Kill(pids[0], syscall.SIGKILL))
		check.Until(r, "the process is reaped and its files are removed", func() bool {
			left, _ := filepath.Glob(filepath.Join(r.folder, "*"))
			return !exists(pids[0]) && len(left) == 0
		})
	})
}

// The file system of the program can hang, too.
func TestStartThatHangs(t *testing.T) {
	r := newRig(t)
	answers, file := make(chan struct{}), filepath.Join(t.TempDir(), "ran")
	r.check = func([]string) error {
		<-answers
		return nil
	}
	p := proof(r.folder, `echo >"$1"`, file)
	p.Timeout, r.outputMax = time.Millisecond, 20*time.Millisecond
	if got := r.run(t.Context(), p); got.Cause != Timeout || got.Left != nil {
		t.Errorf("%+v", got)
	}
	before := runtime.NumGoroutine()
	close(answers)
	check.Until(t, "the run ends", func() bool { return runtime.NumGoroutine() < before })
	if _, err := os.Lstat(file); err == nil {
		t.Error("the command runs after its time")
	}
	r.noneLeft()
}

// fifo is a file that no process writes: one that opens it waits.
func (r *rig) fifo() string {
	path := filepath.Join(r.TempDir(), "fifo")
	check.NoError(r, syscall.Mkfifo(path, 0o600))
	return path
}

func exists(pid int) bool {
	_, ok := readProcess(pid)
	return ok
}

// agent starts this binary as an agent, which runs a script.
func agent(t *testing.T, folder, script string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{script}, args...)...)
	cmd.Env = append(os.Environ(), agentFolder+"="+folder)
	return cmd
}

// Case 9.
func TestCommandEndsWithTheAgent(t *testing.T) {
	r := newRig(t)
	file := filepath.Join(t.TempDir(), "pids")
	cmd := agent(t, r.folder, `trap "" TERM HUP; setsid sh -c 'echo $$ >>"$1"; exec sleep 1000' sh "$1" & while [ ! -s "$1" ]; do sleep 0.01; done
		echo $$ >>"$1"; while :; do read x <"$2"; done`, file, r.fifo())
	check.NoError(t, cmd.Start())
	pids := awaitPIDs(t, file, 2) // of what the command has started, and its own
	leftEnds, commandEnds := ends(t, pids[0]), ends(t, pids[1])
	t.Cleanup(func() { _ = syscall.Kill(pids[0], syscall.SIGKILL) }) // without a control group it is left
	check.NoError(t, r.cleanUp(r.folder))
	if !running(pids[0]) || !running(pids[1]) {
		t.Error("cleaning up ends a run that lasts")
	}
	locks, _ := filepath.Glob(filepath.Join(r.folder, "*"+lockSuffix))
	check.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if !commandEnds(time.Second) {
		t.Error("the command has outlived the agent")
	}
	check.NoError(t, r.cleanUp(r.folder))
	r.noneLeft()
	r.needGroup()
	if !leftEnds(0) {
		t.Error("cleaning up leaves a process of the killed agent's control group")
	}
	group := groupPath(r.groups(), strings.TrimSuffix(filepath.Base(locks[0]), lockSuffix))
	if _, err := os.Lstat(group); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the control group is left: %v", err)
	}
}

// PDEATHSIG is sent at the end of the thread that has started a process, and the runtime of Go ends threads.
func TestCommandOutlivesOtherThreads(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	ended.Go(func() {
		for watch.Sleep(ctx, 100*time.Microsecond) {
			go runtime.LockOSThread() // not unlocked: the thread ends
		}
	})
	for range 20 {
		if got := r.script("sleep 0.01"); got.Outcome != Passed {
			t.Errorf("%+v", got)
		}
	}
	cancel()
	ended.Wait()
}

func TestCleanUpTellsWhatItCannotKill(t *testing.T) {
	r := newRig(t)
	r.needGroup()
	f := files{folder: r.folder, name: newName()}
	p := processes{name: f.name, group: groupPath(r.groups(), f.name)}
	check.NoError(t, f.make(), f.lock.Close())
	group, err := p.makeGroup()
	check.NoError(t, err)
	cmd := exec.Command("sleep", "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	check.NoError(t, cmd.Start(), group.Close())
	defer func() { _ = cmd.Wait() }()
	stuck := r.runner
	stuck.kill, stuck.killWait = func(*processes) {}, time.Millisecond
	if err := stuck.cleanUp(r.folder); err == nil || !strings.Contains(err.Error(), strconv.Itoa(cmd.Process.Pid)) {
		t.Errorf("cleaning up: %v", err)
	}
	check.NoError(t, r.cleanUp(r.folder))
	r.noneLeft()
}

func TestWhatTheCommandGets(t *testing.T) {
	t.Setenv("SECRET", "of the agent")
	t.Setenv("LD_LIBRARY_PATH", "/of/the/agent")
	fd, err := unix.Open("/dev/null", unix.O_RDONLY, 0) // as a library in C can
	check.NoError(t, err)
	defer func() { _ = unix.Close(fd) }()
	bothWays(t, func(r *rig) {
		got := r.script(`pwd; ls -A; ls /proc/$$/fd; cat; echo "$@"; read pid x x x group session x </proc/$$/stat; [ $pid = $group ] && [ $pid = $session ]`, "a b", "$HOME;")
		folder, rest, _ := strings.Cut(got.Output, "\n")
		if got.Outcome != Passed || rest != "0\n1\n2\na b $HOME;\n" || filepath.Dir(folder) != r.folder {
			r.Errorf("%+v", got)
		}
		p := Proof{Command: []string{"/usr/bin/env"}, GPU: "GPU-a", Reason: "boot", Timeout: time.Minute, Folder: r.folder, LibraryPath: "/driver"}
		got = r.run(r.Context(), p)
		_, folder, _ = strings.Cut(got.Output, "HOME=")
		folder, _, _ = strings.Cut(folder, "\n")
		want := []string{"CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=GPU-a", "HOME=" + folder, "LANG=C.UTF-8", "LD_LIBRARY_PATH=/driver",
			"NVIDIA_VISIBLE_DEVICES=GPU-a", "PATH=" + searchPath, "TANDEM_PROOF_REASON=boot", "TMPDIR=" + folder}
		if env := slices.Sorted(strings.Lines(got.Output)); strings.Join(env, "") != strings.Join(want, "\n")+"\n" || filepath.Dir(folder) != r.folder {
			r.Errorf("environment %q, want %q", env, want)
		}
		if got := r.script(`echo "${LD_LIBRARY_PATH-none}"; mkdir -p a/b; echo text >a/b/file`); got.Output != "none\n" {
			r.Errorf("%+v", got)
		}
	})
}

// As the first process of a container, the agent is the parent of orphans.
func TestOrphansAreReaped(t *testing.T) {
	children := func() []process {
		return slices.DeleteFunc(readProcesses(), func(p process) bool { return p.parent != os.Getpid() })
	}
	before := len(children())
	check.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	defer func() { check.NoError(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)) }()
	bothWays(t, func(r *rig) {
		got := r.script(`for i in 1 2 3; do (sleep 1000 &); done; (exit 0 &); exit 0`)
		if got.Outcome != Passed {
			r.Errorf("%+v", got)
		}
	})
	if after := children(); len(after) > before {
		t.Errorf("children are left: %+v", after)
	}
}

func TestManyRunsLeaveNothing(t *testing.T) {
	r := newRig(t)
	type counts struct{ goroutines, files, groups int }
	count := func() counts {
		files, _ := os.ReadDir("/proc/self/fd")
		groups, _ := filepath.Glob(filepath.Join(r.groups(), "tandem-proof-*"))
		return counts{runtime.NumGoroutine(), len(files), len(groups)}
	}
	r.script("exit 0") // what the runtime opens once
	before := count()
	for range 100 {
		if got := r.run(t.Context(), Proof{Command: []string{"/bin/sh", "-c", ":"}, Timeout: time.Minute, Folder: r.folder}); got.Outcome != Passed {
			t.Fatalf("%+v", got)
		}
	}
	check.Until(t, "goroutines, files and control groups are not more than before", func() bool {
		now := count()
		return now.goroutines <= before.goroutines && now.files <= before.files && now.groups <= before.groups
	})
	r.noneLeft()
}

// An agent that is not root makes no control group where it may not, and runs the command as its own user.
func TestWithoutRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the other tests show it")
	}
	const nobody = 65534
	dir, err := os.MkdirTemp("", "proof")
	check.NoError(t, err)
	defer func() { check.NoError(t, os.RemoveAll(dir)) }()
	check.NoError(t, os.Chown(dir, nobody, nobody))
	cmd := agent(t, filepath.Join(dir, "proof"), `id -u; ls /proc/$$/fd; sleep 1000 & exit 1`)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	cmd.Dir = "/"
	text, err := cmd.Output()
	check.NoError(t, err)
	var got Result
	check.NoError(t, json.Unmarshal(text, &got))
	if got.Outcome != Failed || got.Output != "65534\n0\n1\n2\n" || got.Left != nil {
		t.Errorf("%+v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "proof", "*")); len(left) > 0 {
		t.Errorf("files are left: %v", left)
	}
}

func TestGroupFolder(t *testing.T) {
	const (
		v1     = "30 24 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
		whole  = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
		hybrid = "32 24 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
		part   = "33 24 0:27 /kubepods/pod1 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
		above  = "34 24 0:27 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
	)
	for _, c := range []struct{ group, mounts, want string }{
		{"/system.slice/nomad.service", whole, "/sys/fs/cgroup/system.slice/nomad.service"},
		{"/", v1 + hybrid, "/sys/fs/cgroup/unified"},
		{"/kubepods/pod1/c", part, "/sys/fs/cgroup/c"},
		{"/kubepods/pod1", part, "/sys/fs/cgroup"},
		{"/other", part, ""},
		{"/../other", whole, ""},
		{"/a", above, ""},
		{"/a", v1, ""},
		{"", whole, ""},
	} {
		if got := groupFolder(c.group, c.mounts); got != c.want {
			t.Errorf("%s in %s: %q, want %q", c.group, c.mounts, got, c.want)
		}
	}
}
