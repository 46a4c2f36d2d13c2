package cdi

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const (
	// classLimit is the class of devices whose edits are the variables of limitsHook.
	classLimit = inventory.LimitClass

	limitEnv   = "NVIDIA_GPU_MEMORY_LIMIT"
	requestEnv = "NVIDIA_GPU_MEMORY_REQUEST"

	// maxLimits is how many limits the specification has before it loses those that no request can have any more.
	maxLimits = 4096
)

// limitKind is the vendor and class of the limits.
func (o Options) limitKind() string { return o.Vendor + "/" + classLimit }

// noHook is why the hook program sets no limit for containers, in one line; "" if it does.
func (o Options) noHook(h Hooks) string {
	const want = ": want 1.20.1 or newer"
	switch {
	case slices.Contains(o.DisabledHooks, limitsHook) || slices.Contains(o.DisabledHooks, allHooks):
		return "the configuration disables the hook " + limitsHook
	case !h.Found && h.Looked == "":
		return "hook program " + h.Path + " is not visible to this process" + want
	case !h.Found:
		return h.missing() + want
	case h.Version == "":
		return "the version of hook program " + h.Path + " is unknown" + want
	case !h.limits():
		return "hook program " + h.Path + " has version " + h.Version + want
	}
	return ""
}

// limits are the parts of a state on which the specification of limits depends.
type limits struct {
	needed     []uint64 // see inventory.Allocatable.HookLimits
	podLimited []gpu.DeviceID
	backend    string
}

func limitsOf(s core.State) limits {
	l := limits{needed: s.Allocatable.HookLimits(), podLimited: s.Allocatable.PodLimited()}
	if known := s.Host.Limits; known != nil {
		l.backend = known.Backend
	}
	return l
}

func (l limits) equal(o limits) bool {
	return l.backend == o.backend && slices.Equal(l.needed, o.needed) && slices.Equal(l.podLimited, o.podLimited)
}

// addLimits writes the specification of limits, and adds to c what a container can have by it: of the limits that requests can have, and of those that containers have
// from before, whatever the policy is now. The runtime needs their names to start them again.
func (w *Writer) addLimits(ctx context.Context, c *inventory.CDI, l limits, h Hooks, incarnation int) (failed bool) {
	c.WithoutHook = w.withoutHook
	if len(l.needed) == 0 && len(w.stored) == 0 {
		return false
	}
	w.stored = w.readStored()
	present, _ := os.ReadFile(w.limits.Path) // none at first
	mibs, before := slices.Clone(w.stored), parseLimits(specfile.Names(present))
	if len(l.needed) > 0 {
		c.LimitKind, c.NoHook = w.opts.limitKind(), w.opts.noHook(h)
		if l.backend == "" { // what the variables have to be is not known
			c.LimitsProblem = "it is not known by which controller the driver limits memory"
		}
	}
	if l.backend != "" {
		for _, bytes := range l.needed {
			mibs = append(mibs, bytes>>20)
		}
	} else if !slices.ContainsFunc(mibs, func(n uint64) bool { return !slices.Contains(before, n) }) {
		return false // the file stays as it is
	}
	mibs = append(mibs, before[:min(len(before), max(0, maxLimits-len(mibs)))]...)
	text, err := specfile.Marshal(w.limitSpec(mibs, l.backend))
	if err == nil {
		err = w.sync(ctx, &w.limits, text, incarnation)
	}
	if err != nil {
		c.LimitsProblem = classLimit + ": " + oneLine(err)
		return true
	}
	if l.backend != "" {
		c.Limits = l.needed
	}
	return false
}

// readStored reads which limits the orchestrator may start containers with again, in MiB.
func (w *Writer) readStored() []uint64 {
	if w.opts.Stored == nil {
		return nil
	}
	return parseLimits(w.opts.Stored(w.opts.limitKind()))
}

// parseLimits are the limits that CDI devices are named by.
func parseLimits(names []string) (mibs []uint64) {
	for _, name := range names {
		if limit, ok := inventory.ParseLimit(name); ok {
			mibs = append(mibs, limit/gpu.MiB)
		}
	}
	return mibs
}

// limitSpec is the specification of limits.
func (w *Writer) limitSpec(mibs []uint64, backend string) *specs.Spec {
	slices.Sort(mibs)
	var devices []specs.Device
	for _, n := range slices.Compact(mibs) {
		devices = append(devices, specs.Device{Name: strconv.FormatUint(n, 10), ContainerEdits: specs.ContainerEdits{Env: limitVariables(n, backend)}})
	}
	return spec.New(w.opts.limitKind(), devices, specs.ContainerEdits{})
}

// limitVariables are the variables for a limit in MiB. With dmem a reservation would stay in the ancestors of a container's group when that ends, so there is none;
// with misc it has no such effect, and the hook makes it equal to the limit anyway. While the backend is not known there is none, either.
func limitVariables(mib uint64, backend string) []string {
	request := mib
	if backend == inventory.BackendDMem || backend == "" {
		request = 0
	}
	return []string{fmt.Sprintf("%s=%d", limitEnv, mib), fmt.Sprintf("%s=%d", requestEnv, request)}
}
