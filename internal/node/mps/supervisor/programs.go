package supervisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/mps"
)

// Programs of the driver, found by PATH. NVIDIA's container runtime mounts them for the capabilities compute and utility.
const (
	controlProgram = "nvidia-cuda-mps-control"
	smiProgram     = "nvidia-smi"
)

// Compute modes of a GPU, as nvidia-smi names them.
const (
	modeExclusive = "EXCLUSIVE_PROCESS" // of one process, which is the MPS server
	modeDefault   = "DEFAULT"
)

const (
	programAtMost = 20 * time.Second       // for one call of a program: a driver can hang
	outputAtMost  = 500 * time.Millisecond // for the rest of its output when it has ended
)

// startLog is the file in a log directory with what the program printed that started the daemon.
const startLog = "start.log"

// setComputeMode sets the compute mode of GPUs.
func setComputeMode(ctx context.Context, devices []Device, mode string) error {
	_, err := output(ctx, "", nil, smiProgram, "-i", joinIDs(devices), "-c", mode)
	return err
}

// joinIDs returns the UUIDs of devices, with commas.
func joinIDs(devices []Device) string {
	ids := make([]string, len(devices))
	for i, d := range devices {
		ids[i] = string(d.ID)
	}
	return strings.Join(ids, ",")
}

// folders are those of one daemon.
type folders struct{ pipe, log string }

func (f folders) env(more ...string) []string {
	return append(append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+f.pipe, "CUDA_MPS_LOG_DIRECTORY="+f.log), more...)
}

// check reports why no daemon answers.
func (f folders) check() error { return mps.CheckControl(filepath.Join(f.pipe, mps.ControlSocket)) }

// startDaemon starts a daemon for GPUs in the background, and returns when it serves its socket. Its server and clients then have these GPUs
// only: without CUDA_VISIBLE_DEVICES it would use all GPUs of the node.
func (f folders) startDaemon(ctx context.Context, devices []Device) error {
	if err := f.removeStale(); err != nil {
		return err
	}
	// A file: the daemon keeps what it inherits open, so that the end of a pipe would never come.
	printed, err := os.Create(filepath.Join(f.log, startLog))
	if err != nil {
		return err
	}
	defer func() { _ = printed.Close() }()
	ctx, cancel := context.WithTimeout(ctx, programAtMost)
	defer cancel()
	cmd := exec.CommandContext(ctx, controlProgram, "-d")
	cmd.Env, cmd.Stdout, cmd.Stderr = f.env("CUDA_VISIBLE_DEVICES="+joinIDs(devices)), printed, printed
	if err := cmd.Run(); err != nil {
		_, _ = printed.Seek(0, io.SeekStart)
		text, _ := io.ReadAll(io.LimitReader(printed, 4<<10))
		return programError(ctx, err, text, cmd.Args)
	}
	return nil
}

// removeStale removes the socket of a daemon that was killed.
func (f folders) removeStale() error {
	if f.check() == nil {
		return fmt.Errorf("%s: a daemon serves it", f.pipe)
	}
	if err := os.Remove(filepath.Join(f.pipe, mps.ControlSocket)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// command sends a command to the daemon and returns its answer.
func (f folders) command(ctx context.Context, command string) (string, error) {
	return output(ctx, command+"\n", f.env(), controlProgram)
}

// errEarlyClient is the error of a daemon that had a client before it had its limits. The server of such a client has none, and lasts as long as
// the daemon. (Driver 580 takes the percentage of threads from the environment of the daemon, but no memory limit.)
var errEarlyClient = errors.New("a client came before the limits were set")

// limit sets what a client of the daemon may use, for the servers that it starts from now on, which must be all.
func (f folders) limit(ctx context.Context, p Pool) error {
	for i, d := range p.Devices {
		if d.MiB == 0 {
			continue
		}
		// By UUID, and by the index among the visible GPUs: some drivers before 580 ignore UUIDs (k8s-device-plugin#572).
		for _, name := range []string{strconv.Itoa(i), string(d.ID)} {
			if _, err := f.command(ctx, fmt.Sprintf("set_default_device_pinned_mem_limit %s %dM", name, d.MiB)); err != nil {
				return err
			}
		}
	}
	if _, err := f.command(ctx, fmt.Sprintf("set_default_active_thread_percentage %d", p.Threads)); err != nil {
		return err
	}
	servers, err := f.processes(ctx, "get_server_list")
	if err == nil && len(servers) > 0 {
		err = errEarlyClient
	}
	return err
}

// abort ends a daemon that has just started, with its clients: without a time it would wait for them.
func (f folders) abort(ctx context.Context) error {
	_, err := f.command(ctx, "quit -t 1")
	return err
}

// clients returns the number of processes that are connected to the servers of the daemon.
func (f folders) clients(ctx context.Context) (n int, err error) {
	servers, err := f.processes(ctx, "get_server_list")
	for _, server := range servers {
		clients, failed := f.processes(ctx, "get_client_list "+server)
		n, err = n+len(clients), errors.Join(err, failed)
	}
	return n, err
}

// processes returns the PIDs with which the daemon answers a command. Any other answer is an error.
func (f folders) processes(ctx context.Context, command string) ([]string, error) {
	answer, err := f.command(ctx, command)
	pids := strings.Fields(answer)
	for _, pid := range pids {
		if _, invalid := strconv.Atoi(pid); invalid != nil {
			return nil, fmt.Errorf("%s: %s: the answer is not a list of PIDs: %q", controlProgram, command, answer)
		}
	}
	return pids, err
}

// output runs a program and returns what it prints, of which an error has the text, too.
func output(ctx context.Context, stdin string, env []string, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, programAtMost)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env, cmd.Stdin, cmd.WaitDelay = env, strings.NewReader(stdin), outputAtMost
	text, err := cmd.CombinedOutput()
	if err != nil {
		return "", programError(ctx, err, text, append(cmd.Args, strings.TrimSpace(stdin)))
	}
	return string(text), nil
}

// programError is the error of a program that was called with words, and printed a text.
func programError(ctx context.Context, err error, printed []byte, words []string) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("no end within %v: %w", programAtMost, context.Cause(ctx))
	}
	called := strings.TrimSpace(strings.Join(words, " "))
	if printed = bytes.TrimSpace(printed); len(printed) > 0 {
		return fmt.Errorf("%s: %w: %s", called, err, printed)
	}
	return fmt.Errorf("%s: %w", called, err)
}
