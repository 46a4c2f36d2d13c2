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
	"syscall"
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

// pipeVariable has the pipe directory of a daemon, for it and for its clients.
const pipeVariable = "CUDA_MPS_PIPE_DIRECTORY"

// outputLimit is how much a program may print: a process that has taken the place of a daemon answers what it wants.
const outputLimit = 64 << 10

// maxServers is how many servers a daemon has at most. It has one for each user, or one for all.
const maxServers = 64

// setComputeMode sets the compute mode of GPUs.
func (s *Supervisor) setComputeMode(ctx context.Context, devices []Device, mode string) error {
	if s.opts.Hold != nil {
		release, err := s.opts.Hold(ctx)
		if err != nil {
			return &heldError{err}
		}
		defer release()
	}
	_, err := output(ctx, "", nil, smiProgram, "-i", joinIDs(devices), "-c", mode)
	return err
}

// heldError is why nvidia-smi was not called.
type heldError struct{ error }

func (e *heldError) Unwrap() error { return e.error }

// joinIDs returns the UUIDs of devices, with commas.
func joinIDs(devices []Device) string {
	ids := make([]string, len(devices))
	for i, d := range devices {
		ids[i] = string(d.ID)
	}
	return strings.Join(ids, ",")
}

// folders are those of one daemon.
type folders struct {
	root, pipe, log string
	printed         string // file for what the program prints that starts the daemon; clients can't write it
}

func (f folders) env(more ...string) []string {
	return append(append(os.Environ(), pipeVariable+"="+f.pipe, "CUDA_MPS_LOG_DIRECTORY="+f.log), more...)
}

// create makes the folders. A link by which a container leads out of the root is refused.
func (f folders) create() error {
	if err := os.MkdirAll(f.root, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(f.root)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	for _, path := range []string{f.pipe, f.log} {
		below, err := filepath.Rel(f.root, path)
		if err != nil {
			return err
		}
		if err := root.MkdirAll(below, 0o755); err != nil {
			return err
		}
		if path == f.log {
			continue
		}
		folder, err := root.Open(below)
		if err != nil {
			return err
		}
		err = labelForContainers(folder)
		if err := errors.Join(err, folder.Close()); err != nil {
			return err
		}
	}
	return nil
}

// startDaemon starts a daemon for GPUs in the background, and returns when it serves its socket. Its server and clients then have these GPUs
// only: without CUDA_VISIBLE_DEVICES it would use all GPUs of the node.
func (f folders) startDaemon(ctx context.Context, devices []Device) error {
	if err := f.removeControl(); err != nil {
		return err
	}
	// A file: the daemon keeps what it inherits open, so that the end of a pipe would never come.
	printed, err := os.Create(f.printed)
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

// removeControl removes the control file of a daemon that has ended, or of a process that has taken its place.
func (f folders) removeControl() error {
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

// abort ends a daemon that has just started, with its clients: without a time it would wait for them. One that takes no
// command is ended by a signal.
func (f folders) abort(ctx context.Context, p process) error {
	_, err := f.command(ctx, "quit -t 1")
	if err == nil || !p.runs() {
		return err
	}
	return errors.Join(err, p.signal(syscall.SIGKILL))
}

// clients returns the number of processes that are connected to the servers of the daemon.
func (f folders) clients(ctx context.Context) (n int, err error) {
	servers, err := f.processes(ctx, "get_server_list")
	if len(servers) > maxServers {
		return 0, fmt.Errorf("%s: %d servers, want %d at most", controlProgram, len(servers), maxServers)
	}
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
	printed := &limited{}
	cmd.Stdout, cmd.Stderr = printed, printed
	if err := cmd.Run(); err != nil {
		return "", programError(ctx, err, printed.text, append(cmd.Args, strings.TrimSpace(stdin)))
	}
	return string(printed.text), nil
}

// limited takes what a program prints, and fails if that is more than outputLimit: the program ends then.
type limited struct{ text []byte }

func (l *limited) Write(text []byte) (int, error) {
	if len(l.text)+len(text) > outputLimit {
		return 0, fmt.Errorf("it prints more than %d bytes", outputLimit)
	}
	l.text = append(l.text, text...)
	return len(text), nil
}

// programError is the error of a program that was called with words, and printed a text.
func programError(ctx context.Context, err error, printed []byte, words []string) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("no end within %v: %w", programAtMost, context.Cause(ctx))
	}
	called := strings.TrimSpace(strings.Join(words, " "))
	if printed = bytes.TrimSpace(printed[:min(len(printed), 4<<10)]); len(printed) > 0 {
		return fmt.Errorf("%s: %w: %s", called, err, printed)
	}
	return fmt.Errorf("%s: %w", called, err)
}
