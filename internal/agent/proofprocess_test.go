package agent

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/proofcommand"
	"github.com/tandem-gpu/tandem/test/check"
)

// proveUntilTerm is set in a process that does what an agent does with a proof when it ends: it waits for that for ShutdownTimeout.
const proveUntilTerm = "TEST_PROVE_UNTIL_TERM"

// A process whose proof ignores SIGTERM ends in its time nevertheless, and the kernel ends the proof with it.
func TestProofThatIgnoresTheEnd(t *testing.T) {
	if folder := os.Getenv(proveUntilTerm); folder != "" {
		proveUntilEnd(folder)
		os.Exit(0)
	}
	t.Parallel()
	folder := t.TempDir()
	check.NoError(t, syscall.Mkfifo(folder+"/pid", 0o600))
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestProofThatIgnoresTheEnd$")
	c.Env = append(os.Environ(), proveUntilTerm+"="+folder)
	check.NoError(t, c.Start())
	f, err := os.Open(folder + "/pid")
	check.NoError(t, err)
	line, err := bufio.NewReader(f).ReadString('\n')
	check.NoError(t, err)
	pid, err := strconv.Atoi(line[:len(line)-1])
	check.NoError(t, err)

	began := time.Now()
	check.NoError(t, c.Process.Signal(syscall.SIGTERM))
	check.NoError(t, c.Wait())
	took := time.Since(began)
	if took < time.Second || took > ShutdownTimeout+5*time.Second { // 1.8 s; the node may be loaded
		t.Errorf("the process took %v to end", took)
	}
	for began = time.Now(); runs(pid); time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > 5*time.Second {
			t.Fatalf("process %d of the proof still runs", pid)
		}
	}
	t.Logf("the process ended after %v, its proof %v later", took, time.Since(began))
}

// proveUntilEnd runs a proof that ignores SIGTERM until this process gets it.
func proveUntilEnd(folder string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	_ = RunUntil(ctx, func() time.Duration { return ShutdownTimeout }, func() error {
		proofcommand.Run(ctx, proofcommand.Proof{
			Command: []string{"/bin/sh", "-c", `trap "" TERM; echo $$ >` + folder + `/pid; while :; do sleep 0.1; done`},
			GPU:     "GPU-1", Reason: "boot", Timeout: time.Minute, Folder: folder,
		})
		return nil
	})
}

// runs reports whether a process has not ended. One that has may be there until its new parent reads its status.
func runs(pid int) bool {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}
