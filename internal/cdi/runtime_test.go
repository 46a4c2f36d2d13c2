package cdi

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// What the container runtime reports against CDI is the reason of auto, and a warning with a listed strategy. A runtime that does not
// respond is unknown after a second.
func TestRuntimeIsAsked(t *testing.T) {
	off := func(context.Context) Runtime { return Runtime{Name: "containerd", Version: "2.0.1", CDI: gpu.Disabled} }
	release := make(chan struct{})
	defer close(release)
	hangs := func(context.Context) Runtime { <-release; return off(t.Context()) }
	for _, tc := range []struct {
		auto, usable, warns bool
		runtime             func(context.Context) Runtime
	}{{true, false, false, off}, {false, true, true, off}, {true, true, false, hangs}, {false, true, false, hangs}} {
		n, m := newNode(t), newMonitor(inventory.Injection{CDI: inventory.CDIAuto})
		n.Auto, n.Runtime = tc.auto, tc.runtime
		w, _ := n.run(t, m)
		m.read(coretest.GPUs(1))
		c := m.defined(t, ids(0)...).Host.CDI
		const why = "containerd 2.0.1 has CDI switched off"
		warned := slices.ContainsFunc(problem.Lines(w.Problems()), func(line string) bool { return strings.HasPrefix(line, "CDI: "+why) })
		if c.Usable != tc.usable || strings.HasPrefix(c.Reason, why) == tc.usable || warned != tc.warns {
			t.Errorf("auto %t: %t because %q, warnings %q", tc.auto, c.Usable, c.Reason, problem.Lines(w.Problems()))
		}
	}
}

// A runtime that does not respond for a while, or only to one of two calls, is as it was: its restart must not make auto give names
// that it does not read. One of another version is asked anew.
func TestRuntimeRestarts(t *testing.T) {
	off := Runtime{Name: "containerd", Version: "2.0.1", CDI: gpu.Disabled}
	var now Runtime
	w := New(Options{Runtime: func(context.Context) Runtime { return now }})
	for i, step := range []struct{ now, want Runtime }{
		{Runtime{}, Runtime{}}, {off, off}, {Runtime{}, off}, {Runtime{Name: "containerd", Version: "2.0.1"}, off},
		{Runtime{Name: "containerd", Version: "2.4.0"}, Runtime{Name: "containerd", Version: "2.4.0"}},
	} {
		now = step.now
		if r := w.runtime(t.Context()); !reflect.DeepEqual(r, step.want) {
			t.Errorf("step %d: %+v, want %+v", i, r, step.want)
		}
	}
}
