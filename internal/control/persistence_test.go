package control_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// disk is a store that discards what it saves, or fails. It is safe for concurrent use.
type disk struct {
	mu   sync.Mutex
	err  error
	hang chan struct{} // Save waits until it is closed; nil = it does not
}

func (d *disk) Load() (core.Checkpoint, string) { return core.Checkpoint{}, "boot" }
func (d *disk) SetAside(error)                  {}
func (d *disk) Save(core.Checkpoint) error {
	d.mu.Lock()
	err, hang := d.err, d.hang
	d.mu.Unlock()
	if hang != nil {
		<-hang
	}
	return err
}

func (d *disk) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

const full = "no space left on device"

// The output of a command tells whether a restart of the agent reverts it.
func TestCommandsThatAreNotOnDisk(t *testing.T) {
	t.Parallel()
	d := &disk{}
	r := startWith(t, coretest.GPUs(8), d)
	r.xid(1, 95)
	clearAll := func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Clear(ctx, path, control.ClearArgs{GPU: "1"}, out)
	}
	ignore := func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Ignore(ctx, path, control.IgnoreArgs{GPU: "1", Until: "4h"}, out)
	}
	for _, c := range []struct {
		name string
		verb func(context.Context, string, *bytes.Buffer) error
		want string // before the reason; not in the output if the command is on disk
	}{
		{"ignore", ignore, "a restart of the agent reverts it: "},
		{"clear", clearAll, "a restart of the agent reverts it: "},
		{"quiesce", quiesce(control.QuiesceArgs{}), "maintenance is active, but a restart of the agent ends it: "},
		{"resume", resume, "a restart of the agent may begin it again: "},
	} {
		d.fail(errors.New(full))
		if got := r.output(c.verb); !strings.Contains(got, c.want+"not on disk: "+full) {
			t.Errorf("%s, which is not on disk: %q", c.name, got)
		}
		d.fail(nil)
		if c.name == "clear" {
			r.xid(1, 95)
		}
		if c.name == "resume" {
			r.output(quiesce(control.QuiesceArgs{}))
		}
		if got := r.output(c.verb); strings.Contains(got, c.want) || strings.Contains(got, "disk") {
			t.Errorf("%s, which is on disk: %q", c.name, got)
		}
	}
	contains(t, r.log.String(), "persisted=false", "persisted=true", full)
	if got := r.output(quiesce(control.QuiesceArgs{})); !strings.HasPrefix(got, "driver released") || strings.Contains(got, "disk") {
		t.Errorf("quiesce, which is on disk: %q", got)
	}
}

// A disk that hangs delays the command by a second.
func TestQuiesceWithADiskThatHangs(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	r := startWith(t, coretest.GPUs(1), &disk{hang: hang})
	defer close(hang)
	contains(t, r.output(quiesce(control.QuiesceArgs{})), "driver released", "a restart of the agent ends it: not on disk yet")
}

// Maintenance that a hanging call delays is active nevertheless: the error names both.
func TestDelayedMaintenanceThatIsNotOnDisk(t *testing.T) {
	t.Parallel()
	d := &disk{err: errors.New(full)}
	r := startWith(t, coretest.GPUs(2), d)
	release := r.machine.Hang("Probe", gpu.WholeGPU(coretest.GPU(1)))
	defer release()
	r.await("the call", func() bool { return len(r.monitor.Stats().Calls) > 0 })
	err := quiesce(control.QuiesceArgs{})(t.Context(), r.path, &bytes.Buffer{})
	refused, ok := errors.AsType[*control.RefusedError](err)
	if !ok || refused.Status != http.StatusConflict || !strings.Contains(refused.Text, "nvmlProbe") ||
		!strings.Contains(refused.Text, "a restart of the agent ends the maintenance: not on disk: "+full) {
		t.Errorf("got %v", err)
	}
}

// Without a state directory a restart ends the maintenance; it also drops the conditions that were cleared.
func TestCommandsWithoutAStateDirectory(t *testing.T) {
	t.Parallel()
	r := start(t, coretest.GPUs(2))
	r.xid(1, 95)
	if got := r.output(func(ctx context.Context, path string, out *bytes.Buffer) error {
		return control.Ignore(ctx, path, control.IgnoreArgs{GPU: "1", Until: "4h"}, out)
	}); strings.Contains(got, "restart") {
		t.Errorf("ignore: %q", got)
	}
	contains(t, r.output(quiesce(control.QuiesceArgs{})), "a restart of the agent ends it: not on disk: no state directory is set")
	if got := r.output(resume); strings.Contains(got, "restart") {
		t.Errorf("resume: %q", got)
	}
}
