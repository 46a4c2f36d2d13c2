package gpureset

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Limits of the calls of nvidia-smi, and of all that Look and Reset do.
const (
	ResetAtMost = 2 * time.Minute
	callAtMost  = 30 * time.Second // for another one: without persistence mode the driver initialises all GPUs for it, and a driver can hang
	LookAtMost  = scanAtMost + callAtMost + killAtMost
	AtMost      = LookAtMost + callAtMost + scanAtMost + ResetAtMost + callAtMost + 3*killAtMost
)

// Call runs nvidia-smi, and returns all that it printed and its exit status. The error is that it could not be started, or had not ended when
// the context did: context.DeadlineExceeded.
type Call func(ctx context.Context, args ...string) (printed string, status int, err error)

// Local resets GPUs in this process, which is root on the node. Its fields must not change while it is used.
type Local struct {
	Proc    string // where procfs is mounted; "" = /proc
	Program Program
	Call    Call // that of Program, unless a test has another one
}

// Ready returns why this process can't reset a GPU.
func (r Local) Ready(context.Context) error {
	if os.Geteuid() != 0 {
		return &UnavailableError{"run the agent as root", errors.New("nvidia-smi resets GPUs for root only")}
	}
	if !SeesProcesses(r.proc()) {
		return &UnavailableError{"set hostPID: true in its pod", errors.New("this process does not see all processes of the node")}
	}
	if r.Call == nil {
		return r.Program.Check()
	}
	return nil
}

// Look returns what Reset would find.
func (r Local) Look(ctx context.Context, t Target) (Look, error) {
	all, err := r.clients(ctx, t)
	if err != nil || slices.ContainsFunc(all, isNoDaemon) {
		return Look{Clients: all}, err
	}
	on, err := r.persistence(ctx, t.GPU)
	if err != nil || on { // then the daemon closes it when the mode is turned off
		return Look{Persistence: on}, err
	}
	return Look{Clients: all}, nil
}

// isNoDaemon reports whether a client is another process than nvidia-persistenced, of whose name the kernel keeps 15 characters. One that has taken the
// name is found when the daemon has closed the GPU.
func isNoDaemon(c Client) bool { return c.Name != "nvidia-persiste" }

// Reset resets a whole GPU.
func (r Local) Reset(ctx context.Context, t Target) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	look, err := r.Look(ctx, t)
	if err = cmp.Or(err, inUse(t, look.Clients), ctx.Err()); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if !look.Persistence {
		return r.reset(ctx, t.GPU)
	}
	return r.withoutPersistence(ctx, t.GPU, func() error {
		all, err := r.clients(ctx, t)
		if err = cmp.Or(err, inUse(t, all)); err != nil {
			return err
		}
		return r.reset(ctx, t.GPU)
	})
}

// withoutPersistence turns the persistence mode of a GPU off, and on again whatever becomes of it.
func (r Local) withoutPersistence(ctx context.Context, id gpu.DeviceID, do func() error) error {
	err := r.setPersistence(ctx, id, "0")
	if e, ok := errors.AsType[*RefusedError](err); err != nil && (!ok || e.Refusal != TimedOut) {
		return err // it is still on
	}
	if err == nil {
		err = do()
	}
	return errors.Join(err, r.Restore(ctx, id))
}

func (r Local) reset(ctx context.Context, id gpu.DeviceID) error {
	printed, status, err := r.call(ctx, ResetAtMost, "--gpu-reset", "-i", string(id))
	if err == nil && status == 0 && strings.Contains(printed, "was successfully reset") {
		return nil
	}
	return refused(id, printed, err)
}

// Restore turns the persistence mode of a GPU on.
func (r Local) Restore(ctx context.Context, id gpu.DeviceID) error {
	if err := r.setPersistence(ctx, id, "1"); err != nil {
		return &PersistenceError{id, err}
	}
	return nil
}

func inUse(t Target, clients []Client) error {
	if len(clients) == 0 {
		return nil
	}
	return &InUseError{t.GPU, clients}
}

// persistence reports whether a GPU's persistence mode is on. With it the driver, or nvidia-persistenced, has the GPU open, and it can't be reset. A GPU
// that does not report it ("[GPU requires reset]") keeps the mode that it has: if it is on, nvidia-smi refuses the reset.
func (r Local) persistence(ctx context.Context, id gpu.DeviceID) (bool, error) {
	printed, status, err := r.call(ctx, callAtMost, "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", string(id))
	text := strings.TrimSpace(printed)
	switch off := text == "Disabled" || strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]"); {
	case err == nil && status == 0 && text == "Enabled":
		return true, nil
	case err == nil && status == 0 && off:
		return false, nil
	}
	return false, refused(id, printed, err)
}

func (r Local) setPersistence(ctx context.Context, id gpu.DeviceID, to string) error {
	printed, status, err := r.call(ctx, callAtMost, "-pm", to, "-i", string(id))
	if err == nil && status == 0 {
		return nil
	}
	return refused(id, printed, err)
}

func (r Local) call(ctx context.Context, atMost time.Duration, args ...string) (string, int, error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	if r.Call != nil {
		return r.Call(ctx, args...)
	}
	return r.Program.Call(ctx, args...)
}

func (r Local) proc() string { return cmp.Or(r.Proc, "/proc") }

// scanAtMost is for how long the processes are read.
const scanAtMost = 10 * time.Second

// clients returns the processes that have a GPU open. procfs can wait for a process that hangs.
func (r Local) clients(ctx context.Context, t Target) ([]Client, error) {
	type answer struct {
		all []Client
		err error
	}
	read := make(chan answer, 1)
	go func() {
		all, err := Clients(r.proc(), t.Minor)
		read <- answer{all, err}
	}()
	late := time.NewTimer(scanAtMost)
	defer late.Stop()
	select {
	case a := <-read:
		return a.all, a.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-late.C:
		return nil, fmt.Errorf("the open files of all processes were not read within %v: one of them hangs", scanAtMost)
	}
}
