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
	LookAtMost  = lockWithin + scanAtMost + callAtMost + killAtMost
	AtMost      = LookAtMost + callAtMost + scanAtMost + ResetAtMost + callAtMost + 3*killAtMost
)

// Call runs nvidia-smi, and returns all that it printed and its exit status. The error is that it could not be started, or had not ended when
// the context did: context.DeadlineExceeded.
type Call func(ctx context.Context, args ...string) (printed string, status int, err error)

// Local resets GPUs in this process, which is root on the node. Its fields must not change while it is used.
type Local struct {
	Proc    string // where procfs is mounted; "" = /proc
	Program Program
	Call    Call  // that of Program, unless a test has another one
	Lock    *Lock // of the node; nil = none
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
	release, err := r.Lock.Hold(ctx)
	if err != nil {
		return Look{}, err
	}
	defer release()
	look, _, err := r.look(ctx, t)
	return look, err
}

// look is Look with the persistence mode that nvidia-smi shows.
func (r Local) look(ctx context.Context, t Target) (Look, gpu.Toggle, error) {
	all, err := r.clients(ctx, t)
	if err != nil || slices.ContainsFunc(all, isNoDaemon) {
		return Look{Clients: all}, gpu.ToggleUnknown, err
	}
	mode, err := r.persistence(ctx, t.GPU)
	if err != nil {
		return Look{}, mode, err
	}
	// nvidia-persistenced has a GPU open only while its mode is on, and closes it when the mode is turned off.
	if on := t.Persistence || len(all) > 0; mode == gpu.Enabled || mode == gpu.ToggleUnknown && on {
		return Look{Persistence: true}, mode, nil
	}
	return Look{Clients: all}, mode, nil
}

// isNoDaemon reports whether a client is another process than nvidia-persistenced, of whose name the kernel keeps 15 characters. One that has taken the
// name is found when the daemon has closed the GPU.
func isNoDaemon(c Client) bool { return c.Name != "nvidia-persiste" }

// Reset resets a whole GPU.
func (r Local) Reset(ctx context.Context, t Target) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	release, err := r.Lock.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	look, mode, err := r.look(ctx, t)
	if err = cmp.Or(err, inUse(t, look.Clients), ctx.Err()); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if !look.Persistence {
		return r.reset(ctx, t.GPU)
	}
	return r.withoutPersistence(ctx, t.GPU, mode, func() error {
		all, err := r.clients(ctx, t)
		if err = cmp.Or(err, inUse(t, all)); err != nil {
			return err
		}
		return r.reset(ctx, t.GPU)
	})
}

// withoutPersistence turns the persistence mode of a GPU off, and on again whatever becomes of it. A GPU that does not
// show its mode may refuse that, and is reset if nothing has it open nevertheless.
func (r Local) withoutPersistence(ctx context.Context, id gpu.DeviceID, mode gpu.Toggle, do func() error) error {
	err := r.setPersistence(ctx, id, "0")
	e, refused := errors.AsType[*RefusedError](err)
	switch {
	case err == nil:
		return errors.Join(do(), r.restore(ctx, id))
	case refused && e.Refusal == TimedOut:
		return errors.Join(err, r.restore(ctx, id))
	case refused && mode == gpu.ToggleUnknown:
		return do()
	}
	return err // it is still on
}

func (r Local) reset(ctx context.Context, id gpu.DeviceID) error {
	printed, status, err := r.call(ctx, ResetAtMost, "--gpu-reset", "-i", string(id))
	if err == nil && succeeded(status) && strings.Contains(printed, "was successfully reset") {
		return nil
	}
	return refused(id, printed, err)
}

// corruptedInfoROM is the exit status with which nvidia-smi warns of a corrupted infoROM beside what it has done
// (NVML_ERROR_CORRUPTED_INFOROM).
const corruptedInfoROM = 14

func succeeded(status int) bool { return status == 0 || status == corruptedInfoROM }

// Restore turns the persistence mode of a GPU on.
func (r Local) Restore(ctx context.Context, id gpu.DeviceID) error {
	release, err := r.Lock.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	return r.restore(ctx, id)
}

func (r Local) restore(ctx context.Context, id gpu.DeviceID) error {
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

// persistence returns the persistence mode of a GPU. With it the driver, or nvidia-persistenced, has the GPU open, and
// it can't be reset. A GPU that does not report it ("[GPU requires reset]", "[N/A]", "[Unknown Error]") is no GPU
// without it: the mode is unknown. Beside the answer nvidia-smi prints warnings.
func (r Local) persistence(ctx context.Context, id gpu.DeviceID) (gpu.Toggle, error) {
	printed, status, err := r.call(ctx, callAtMost, "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", string(id))
	if err != nil || !succeeded(status) {
		return gpu.ToggleUnknown, refused(id, printed, err)
	}
	var answers []gpu.Toggle
	for line := range strings.Lines(printed) {
		switch text := strings.TrimSpace(line); {
		case text == gpu.Enabled.String():
			answers = append(answers, gpu.Enabled)
		case text == gpu.Disabled.String():
			answers = append(answers, gpu.Disabled)
		case strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]"):
			answers = append(answers, gpu.ToggleUnknown)
		}
	}
	if len(answers) != 1 {
		return gpu.ToggleUnknown, refused(id, printed, nil)
	}
	return answers[0], nil
}

func (r Local) setPersistence(ctx context.Context, id gpu.DeviceID, to string) error {
	printed, status, err := r.call(ctx, callAtMost, "-pm", to, "-i", string(id))
	if err == nil && (status == 0 || status == corruptedInfoROM && strings.Contains(printed, "All done.")) {
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
	return r.Program.call(ctx, r.Lock, args...)
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
