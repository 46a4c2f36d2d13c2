package gpureset

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/test/check"
)

// shell stands for nvidia-smi where its texts do not matter.
var shell = Program{Path: "/bin/sh"}

func TestProgramReturnsWhatIsPrinted(t *testing.T) {
	t.Setenv("SECRET", "of the agent")
	printed, status, err := shell.Call(t.Context(), "-c", `echo out; echo err >&2; read line || echo "no stdin"; env | grep -v ^PWD= | grep -v ^_= | grep -v ^SHLVL= | sort; ls /proc/$$/fd; exit 255`)
	want := "out\nerr\nno stdin\nLC_ALL=C\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n0\n1\n2\n"
	if err != nil || status != 255 || printed != want {
		t.Errorf("%q, status %d, %v", printed, status, err)
	}
	printed, status, err = shell.Call(t.Context(), "-c", `read pid x x x group session x </proc/$$/stat; [ $pid = $group ] && [ $pid = $session ]`)
	if err != nil || status != 0 {
		t.Errorf("no session of its own: %q, status %d, %v", printed, status, err)
	}
	if printed, _, err = shell.Call(t.Context(), "-c", "head -c 1000000 /dev/zero"); err != nil || len(printed) != 64<<10 {
		t.Errorf("%d bytes, %v", len(printed), err)
	}
}

func TestProgramThatDoesNotEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	file := filepath.Join(t.TempDir(), "pid")
	go func() {
		defer cancel()
		check.Until(t, "it runs", func() bool { s, err := os.Stat(file); return err == nil && s.Size() > 0 })
	}()
	printed, _, err := shell.Call(ctx, "-c", `trap "" TERM; echo begun; echo $$ >"$1"; while :; do sleep 0.01; done`, "sh", file)
	if !errors.Is(err, context.Canceled) || printed != "begun\n" {
		t.Errorf("%q, %v", printed, err)
	}
	if _, status, err := shell.Call(t.Context(), "-c", `kill -0 $(cat "$1")`, "sh", file); err != nil || status == 0 {
		t.Errorf("it still runs: status %d, %v", status, err)
	}
	if _, _, err := shell.Call(t.Context(), "-c", "kill -SEGV $$"); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ended by a signal: %v", err)
	}
	// What it has started, as nvidia-modprobe, does not keep the call.
	if printed, status, err := shell.Call(t.Context(), "-c", "sleep 1000 & echo $!"); err != nil || status != 0 {
		t.Errorf("%q, status %d, %v", printed, status, err)
	} else if _, _, err := shell.Call(t.Context(), "-c", "kill "+printed); err != nil {
		t.Error(err)
	}
}

// A process that can't be killed is left.
func TestProcessInTheKernel(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if left, err := await(ctx, make(chan error)); !left || !errors.Is(err, context.Canceled) || time.Since(began) > 2*killAtMost {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	if LookAtMost+AtMost > 290*time.Second { // the grace period of the component has 300 s for both
		t.Errorf("a reset takes up to %v after a look of %v", AtMost, LookAtMost)
	}
}

// A reset that has begun goes on when the agent is killed.
func TestProgramOutlivesTheAgent(t *testing.T) {
	if file := os.Getenv("GPURESET_AGENT"); file != "" {
		_, _, _ = shell.Call(t.Context(), "-c", `echo >"$1.begun"; sleep 0.3; echo >"$1.ended"`, "sh", file)
		return
	}
	file := filepath.Join(t.TempDir(), "file")
	agent := exec.Command("/proc/self/exe", "-test.run=^TestProgramOutlivesTheAgent$")
	agent.Env, agent.SysProcAttr = append(os.Environ(), "GPURESET_AGENT="+file), &syscall.SysProcAttr{Setpgid: true}
	check.NoError(t, agent.Start())
	exists := func(path string) bool { _, err := os.Lstat(path); return err == nil }
	check.Until(t, "the program runs", func() bool { return exists(file + ".begun") })
	check.NoError(t, syscall.Kill(-agent.Process.Pid, syscall.SIGKILL)) // its whole process group
	_ = agent.Wait()
	check.Until(t, "the program has ended by itself", func() bool { return exists(file + ".ended") })
}

func TestProgramIsFound(t *testing.T) {
	root, files := t.TempDir(), t.TempDir()
	make := func(dir, path string) {
		check.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755), os.WriteFile(filepath.Join(dir, path), nil, 0o755))
	}
	make(root, "lib64/ld-linux-x86-64.so.2")
	make(root, "usr/local/bin/nvidia-smi")
	make(files, "bin/nvidia-smi")
	make(files, "lib64/libnvidia-ml.so.1")
	libraries := []string{"usr/lib64", "lib64"}
	for name, c := range map[string]struct {
		program Program
		want    place
	}{
		"a driver container":      {Program{Root: root, Libraries: libraries}, place{root, "/usr/local/bin/nvidia-smi", ""}},
		"its program by a path":   {Program{Root: root, Path: "/opt/smi"}, place{root, "/opt/smi", ""}},
		"a folder of the driver":  {Program{Root: files, Libraries: libraries}, place{"/", files + "/bin/nvidia-smi", files + "/lib64/libnvidia-ml.so.1"}},
		"another program with it": {Program{Root: files, Path: "/bin/sh", Libraries: libraries}, place{"/", "/bin/sh", files + "/lib64/libnvidia-ml.so.1"}},
		"this process's root":     {Program{Path: "/bin/sh", Libraries: libraries}, place{"/", "/bin/sh", ""}},
	} {
		if got, _ := c.program.place(); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
	for name, c := range map[string]struct {
		program Program
		cause   error
	}{
		"none":          {Program{Root: t.TempDir()}, nil},
		"missing":       {Program{Path: "/no/such/program"}, proofcommand.ErrMissing},
		"relative":      {Program{Path: "nvidia-smi"}, proofcommand.ErrRelative},
		"not a program": {Program{Path: "/etc/passwd"}, proofcommand.ErrNotExecutable},
	} {
		err := c.program.Check()
		e, ok := errors.AsType[*UnavailableError](err)
		if !ok || e.Remedy == "" || c.cause != nil && !errors.Is(err, c.cause) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, called := c.program.Call(t.Context()); called == nil || called.Error() != err.Error() {
			t.Errorf("%s: called: %v", name, called)
		}
	}
}

// nvidia-smi loads the driver's library as root, too.
func TestLibraryThatOthersCanWrite(t *testing.T) {
	dir := t.TempDir()
	library := filepath.Join(dir, "lib64/libnvidia-ml.so.1")
	check.NoError(t, os.Chmod(dir, 0o755), os.Mkdir(filepath.Dir(library), 0o755), os.WriteFile(library, nil, 0o644))
	p := Program{Root: dir, Path: "/bin/sh", Libraries: []string{"lib64"}}
	if err := p.Check(); err != nil {
		t.Skipf("no folder that only this user can write: %v", err)
	}
	check.NoError(t, os.Chmod(library, 0o666))
	if err := p.Check(); !errors.Is(err, proofcommand.ErrWritable) {
		t.Errorf("%v", err)
	}
}

func TestProgramInAnotherRoot(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("chroot needs root")
	}
	p := Program{Root: "/proc/self/root", Path: "/bin/sh"}
	if at, err := p.place(); err != nil || at.root == "/" {
		t.Skipf("%+v, %v", at, err)
	}
	if printed, status, err := p.Call(t.Context(), "-c", "pwd"); err != nil || status != 0 || strings.TrimSpace(printed) != "/" {
		t.Errorf("%q, status %d, %v", printed, status, err)
	}
}

func TestLocalIsReady(t *testing.T) {
	err := Local{Program: shell}.Ready(t.Context())
	e, ok := errors.AsType[*UnavailableError](err)
	if err != nil && (!ok || e.Remedy == "") {
		t.Errorf("%v", err)
	}
	proc := t.TempDir()
	check.NoError(t, os.MkdirAll(proc+"/self/ns", 0o755), os.Symlink("pid:[4026532000]", proc+"/self/ns/pid"))
	if err := (Local{Proc: proc, Program: shell}).Ready(t.Context()); err == nil || os.Geteuid() == 0 && !strings.Contains(err.Error(), "hostPID") {
		t.Errorf("in another PID namespace: %v", err)
	}
	if err := (Local{Proc: t.TempDir(), Program: Program{Path: "/no/such/program"}}).Ready(t.Context()); err == nil {
		t.Error("without nvidia-smi")
	}
}
