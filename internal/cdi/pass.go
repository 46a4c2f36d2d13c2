package cdi

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/tandem-gpu/tandem/internal/cdi/driverfiles"
	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// outcome is the result of one pass.
type outcome struct {
	cdi     *inventory.CDI
	failed  bool   // try again soon
	library string // the driver's main library, as this process sees it; "" = not found
	hooks   string // the hook program, as this process sees it; "" = not found
	present bool   // of sweep: there is a specification of an earlier agent
}

// pass makes the files fit a state with a driver that is ready. It may wait for a disk. When ctx ends it changes no file any more: the
// writer of the next agent in this process may have written them.
func (w *Writer) pass(ctx context.Context, s core.State) outcome {
	hooks := w.hooks.look(w.opts)
	request := w.request(s, hooks)
	var warnings []string
	c := w.opts.undefined(s, "")
	built, files, err := w.build(s, request)
	if err == nil {
		warnings = append(warnings, built.Notes...)
		c.Libraries, c.Undefined = files.Libraries, built.Undefined
		c.Defined, err = w.writeGPUs(ctx, built, s.Incarnation)
	}
	if err == nil {
		w.withoutHook = s.Allocatable.PodLimited()
	}
	failed := err != nil
	if failed {
		c.Problem = oneLine(err)
	}
	limitsFailed := w.addLimits(ctx, c, limitsOf(s), hooks, s.Incarnation)
	others, othersFailed := w.writeOthers(ctx, s, request)
	for _, o := range others {
		if o.problem != "" {
			warnings = append(warnings, o.problem)
		} else {
			c.Others = append(c.Others, o.name)
		}
	}
	if ctx.Err() != nil {
		return outcome{}
	}
	warnings = append(warnings, w.conflicts(c, built.Names)...)
	problem := c.Problem
	if problem == "" && len(c.Defined) == 0 && len(c.Undefined) > 0 {
		problem = c.Undefined[0].Reason // such as a node that NVIDIA's runtime would create
	}
	c.Usable, c.Reason = w.decide(ctx, problem, hooks)
	c.NoStart, c.NoLimits = w.opts.noStart(hooks), w.opts.noLimits(hooks, s.Snapshot.Driver.Version)
	if !w.opts.Auto && namesAreGiven(s.Allocatable) {
		if c.NoStart != "" {
			warnings = append(warnings, c.NoStart)
		}
		if why := w.runtime(ctx).refuses(w.opts.Folder); why != "" {
			warnings = append(warnings, why+"; until then containers get no device by CDI, and no error")
		}
	}
	if limitsFailed {
		warnings = append(warnings, c.LimitsProblem)
	}
	if c.Problem != "" {
		warnings = append(warnings, c.Problem)
	}
	w.setProblems(warnings, time.Now())
	limitsFailed = limitsFailed || c.NoHook != "" && !hooks.Found
	failed = failed || othersFailed || limitsFailed || c.NoStart != "" && hasClaims(s.Allocatable) // then it is looked for again soon
	return outcome{cdi: c, failed: failed, library: files.Libcuda, hooks: hooks.seenAt()}
}

// request is what to look for in the installation of a driver.
func (w *Writer) request(s core.State, h Hooks) driverfiles.Request {
	return driverfiles.Request{
		Version: s.Snapshot.Driver.Version, Root: w.opts.ContainerRoot, HostRoot: w.opts.DriverRoot, DevRoot: w.opts.ContainerDevRoot,
		HookPath: w.opts.HookPath, DisabledHooks: w.opts.disabledHooks(h), FeatureFlags: w.opts.FeatureFlags,
		VoidMount: h.voidMount(), Log: w.opts.Log,
	}
}

// build returns the specification of the GPUs and MIG instances.
func (w *Writer) build(s core.State, r driverfiles.Request) (spec.Result, driverfiles.Files, error) {
	files, err := w.driver.read(r, s.Incarnation)
	if err != nil {
		return spec.Result{}, files, err
	}
	podLimited := s.Allocatable.PodLimited()
	common := files.Edits
	if w.opts.noHooks() { // without links and cache, the linker of a container finds a library by its name only
		common = spec.WithMounts(common, files.Sonames)
	}
	return spec.Build(spec.Input{
		Kind: w.opts.kind(), Devices: s.Snapshot.Devices, Lost: s.Ledger.Lost(s.Snapshot.Devices), Nodes: s.Snapshot.Nodes,
		DRM: w.opts.readDRM(s.Snapshot.Devices), DevRoot: w.opts.DevRoot, Indices: w.opts.Indices, Common: common,
		Symlinks: func(links []string) *specs.Hook { return driverfiles.SymlinksHook(r, links) },
		MemoryLimits: func(id gpu.DeviceID) *specs.Hook {
			if _, byPod := slices.BinarySearch(podLimited, id); byPod {
				return nil
			}
			return driverfiles.MemoryLimitsHook(r, string(id))
		},
	}), files, nil
}

// driverCache has the files of a driver. They are looked for once for each incarnation of the driver, as that needs 1,000 system
// calls, and again if one of them is gone.
type driverCache struct {
	key   string
	files driverfiles.Files
}

func (c *driverCache) read(r driverfiles.Request, incarnation int) (driverfiles.Files, error) {
	key := fmt.Sprint(r.Version, incarnation, r.DisabledHooks, r.VoidMount)
	if c.key == key && c.files.Complete() {
		return c.files, nil
	}
	c.key = ""
	files, err := driverfiles.Read(r)
	if err == nil {
		c.key, c.files = key, files
	}
	return files, err
}

// writeGPUs writes the specification of the GPUs, or removes the file if there is none, and returns which devices the file defines.
func (w *Writer) writeGPUs(ctx context.Context, built spec.Result, incarnation int) ([]gpu.DeviceID, error) {
	if w.withdraw != nil {
		w.withdraw(ctx, slices.Sorted(maps.Values(built.Names)))
	}
	if built.Spec == nil {
		return nil, w.remove(ctx, &w.gpus)
	}
	text, err := specfile.Encode(built.Spec)
	if err == nil && !w.gpus.Holds(text, incarnation) { // else it was validated
		err = specfile.Validate(text)
	}
	if err != nil { // the file that is there stays
		return nil, fmt.Errorf("specification not valid: %w", err)
	}
	err = w.sync(ctx, &w.gpus, text, incarnation)
	if err == nil {
		return built.Defined, nil
	}
	// The file may still be the previous one of this incarnation, or that of another process.
	state, foreign := w.gpus.Check()
	var names []string
	switch {
	case state == specfile.Ours && w.gpus.Written(incarnation):
		if own, readErr := os.ReadFile(w.gpus.Path); readErr == nil {
			names = specfile.Names(own)
		}
	case state == specfile.Foreign && w.gpus.Written(incarnation):
		names = specfile.Names(foreign)
	}
	return slices.DeleteFunc(slices.Clone(built.Defined), func(id gpu.DeviceID) bool { return !slices.Contains(names, string(id)) }), err
}

// sync makes a file have a text that was made for an incarnation of the driver. It does not touch a file that has it already, unless
// the driver is another incarnation: runtimes keep the numbers of device nodes until the file changes.
func (w *Writer) sync(ctx context.Context, f *specfile.File, text []byte, incarnation int) error {
	if w.dry {
		return w.opts.canWrite()
	}
	check := specfile.MakeFolder
	if w.opts.FolderIsMount {
		check = specfile.CheckMount
	}
	if err := check(w.opts.Folder); err != nil {
		return err
	}
	state, foreign := f.Check()
	if state == specfile.Ours && f.Holds(text, incarnation) {
		return nil
	}
	if state == specfile.Foreign && bytes.Contains(foreign, []byte(limitsHook)) && !bytes.Contains(text, []byte(limitsHook)) {
		w.opts.Log.Warn("CDI: the specification that is replaced set memory limits for containers, and the new one does not: "+
			"see doctor", "file", f.Path, "hook", limitsHook)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	level := slog.LevelInfo
	if state == specfile.Foreign && f.Written(incarnation) {
		if err := w.conflict.record(f.Path, time.Now()); err != nil {
			return err
		}
		level = slog.LevelDebug // setProblems logs the conflict
	}
	if err := f.Replace(text, incarnation); err != nil {
		return err
	}
	w.opts.Log.Log(ctx, level, "CDI specification written", "file", f.Path, "names", len(specfile.Names(text)))
	return nil
}

// remove removes a file that has nothing to define.
func (w *Writer) remove(ctx context.Context, f *specfile.File) error {
	if w.dry {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	removed, err := f.Remove()
	if removed {
		w.opts.Log.Info("CDI specification removed: there is no device", "file", f.Path)
	}
	if err != nil {
		return fmt.Errorf("not removed: %w", err)
	}
	return nil
}

// conflicts returns a line for each other file that defines the kind of the GPUs. In the same folder, runtimes give neither device
// of a name that two files define: such a device is not defined, if containers get it by that name.
func (w *Writer) conflicts(c *inventory.CDI, names map[string]gpu.DeviceID) (lines []string) {
	for _, e := range w.scanner.Scan(w.opts.folders()...) {
		if e.Kind != c.Kind {
			continue
		}
		if filepath.Dir(e.Path) != w.opts.Folder {
			lines = append(lines, fmt.Sprintf("%s defines devices of %s, too: it is used as soon as %s is removed; remove it", e.Path, c.Kind, w.gpus.Path))
			continue
		}
		lines = append(lines, fmt.Sprintf("%s defines devices of %s, as %s does: container runtimes refuse names that are in both; remove it", e.Path, c.Kind, w.gpus.Path))
		for _, name := range e.Devices {
			if id, ok := names[name]; ok && (name == string(id) || w.opts.Indices) { // else containers do not get the device by that name
				c.Defined = slices.DeleteFunc(slices.Clone(c.Defined), func(d gpu.DeviceID) bool { return d == id })
				c.Undefined = addUndefined(c.Undefined, inventory.Undefined{Device: id, Reason: fmt.Sprintf("%s defines device %q, too: remove that file", e.Path, name)})
			}
		}
	}
	return lines
}

func addUndefined(list []inventory.Undefined, u inventory.Undefined) []inventory.Undefined {
	at, found := slices.BinarySearchFunc(list, u, func(x, y inventory.Undefined) int { return strings.Compare(string(x.Device), string(y.Device)) })
	if found {
		return list
	}
	return slices.Insert(slices.Clone(list), at, u)
}

// runtimeAtMost is how long a pass waits for what is known of the container runtime.
const runtimeAtMost = time.Second

// decide reports whether containers can use the specification.
func (w *Writer) decide(ctx context.Context, problem string, h Hooks) (bool, string) {
	switch {
	case w.opts.Auto:
		return Decide(problem, w.opts.Folder, h, w.runtime(ctx))
	case problem != "":
		return false, problem
	}
	return true, "specification in " + w.opts.Folder
}

// runtime returns what is known of the container runtime. One that does not respond, as during its restart, is as it was.
func (w *Writer) runtime(ctx context.Context) Runtime {
	if w.opts.Runtime == nil {
		return Runtime{}
	}
	ctx, cancel := context.WithTimeout(ctx, runtimeAtMost)
	defer cancel()
	answer := make(chan Runtime, 1)
	go func() { answer <- w.opts.Runtime(ctx) }()
	select {
	case r := <-answer:
		if !r.LacksSettingsOf(w.lastRuntime) {
			w.lastRuntime = r
		}
	case <-ctx.Done():
	}
	return w.lastRuntime
}

// namesAreGiven reports whether containers get names of CDI devices, and not only the driver's files as mounts.
func namesAreGiven(inv *inventory.Allocatable) bool {
	for u := range inv.Devices() {
		if u.Injection.CDI != inventory.CDIOff {
			return true
		}
	}
	return false
}

// hasClaims reports whether devices are offered to claims, which wait while no container starts.
func hasClaims(inv *inventory.Allocatable) bool {
	for u := range inv.Devices() {
		if u.API == inventory.DRA {
			return true
		}
	}
	return false
}

// oneLine is the text of an error in one line.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
