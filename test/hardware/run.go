package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
	"github.com/tandem-gpu/tandem/test/hardware/compare"
	"github.com/tandem-gpu/tandem/test/rig"
)

// run is a run in progress.
type run struct {
	options
	*Report
	dir    string // for sockets, state and the CUDA program
	log    *os.File
	idle   moduleUse                 // before the agents start
	before map[string]compare.Source // what the agents print before they run, by agent

	sources []compare.Source // that do not change while the agents run

	nomad   *rig.Nomad
	kubelet *rig.Kubelet
}

// run runs all checks. The error is of what no report can be made of.
func (o options) run(ctx context.Context, out io.Writer) (_ *Report, err error) {
	if o.bin, err = filepath.Abs(o.bin); err != nil { // a program without a folder in its path is looked for in $PATH
		return nil, err
	}
	leftOut, err := o.prerequisites()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "hw") // a short path: it has sockets
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	log, err := os.Create(filepath.Join(dir, "agents.log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	r := &run{options: o, Report: newReport(out), dir: dir, log: log, before: map[string]compare.Source{}}
	if o.roots.Driver != "/" {
		r.Machine = "simulated driver"
	}
	for _, text := range leftOut {
		r.add("host", "rights", LeftOut, text)
	}
	for _, part := range []struct {
		name string
		run  func(context.Context)
	}{
		{"nvml", r.readDriver}, {"inspect", r.inspect}, {"agents", r.startAgents}, {"values", r.compareValues}, {"reservations", r.reserveAll},
		{"doctor", r.diagnose}, {"cuda", r.useCUDA}, {"prove", r.proveAll}, {"maintenance", r.maintain}, {"end", r.stopAgents},
	} {
		if ctx.Err() != nil && part.name != "end" {
			r.add(part.name, "not run", Failed, ctx.Err().Error())
			continue
		}
		r.timed(part.name, func() { part.run(ctx) })
	}
	return r.finish()
}

// finish writes the report.
func (r *run) finish() (*Report, error) {
	r.Seconds = time.Since(r.Date).Seconds()
	if text, err := os.ReadFile(r.log.Name()); err == nil {
		r.files["agents.log"] = string(text)
	}
	dir, err := r.write(r.out)
	if err != nil {
		return r.Report, err
	}
	verdict := "no check failed"
	if n := r.Bad(); n > 0 {
		verdict = fmt.Sprintf("%d of %d checks FAILED", n, len(r.Checks))
	}
	fmt.Fprintf(r.terminal, "\n%s on %s, driver %s, in %.0f s: %s\n%s/: report.json, section.md (for docs/hardware.md), values.txt, machine.conf (without UUIDs and serial numbers), agents.log, output of nvidia-smi\n",
		verdict, r.kinds(), r.Driver, r.Seconds, r.Date.Format(time.RFC3339), dir)
	return r.Report, nil
}

// inspect runs both agents' inspect before they run: each reads the driver itself.
func (r *run) inspect(ctx context.Context) {
	for _, name := range agents {
		text, err := r.verb(ctx, name, filepath.Join(r.dir, "none"), "inspect", "--json")
		if err != nil {
			r.check("inspect", name, "", err)
			continue
		}
		r.files[name+"-inspect.json"] = text
		report, err := parseReport(text)
		if !r.check("inspect", name, fmt.Sprintf("%d devices, %d excluded, driver %s", len(report.Devices), len(report.Excluded), report.Driver.State), err) {
			continue
		}
		for _, e := range report.Excluded {
			r.add("inspect", name+" excludes", map[bool]Result{true: Failed, false: Note}[e.Failed], fmt.Sprintf("GPU %d: %s", e.Index, e.Reason))
		}
		r.before[name] = compare.OfReport(name+" inspect alone", report)
		r.sources = append(r.sources, r.before[name])
	}
}

// readDriver records the driver, and reads the connections of GPUs as the agents do.
func (r *run) readDriver(context.Context) {
	r.idle = r.moduleUse()
	r.add("nvml", "kernel module before", Note, r.idle.String())
	r.record()
	s, err := nvidia.Open(nvidia.Options{Roots: r.roots})
	if err != nil {
		r.check("nvml", "session of the agents", "", err)
		return
	}
	first, err := s.Snapshot()
	second, again := s.Snapshot()
	if err = errors.Join(err, again, s.Close()); err == nil && !first.Equal(second) {
		err = errors.New("two readings without a change differ")
	}
	for _, d := range first.Devices { // nvidia-smi shows no slices: those of an instance's GPU instance have its compute slices
		if d.Profile != "" && (d.Slices.GPU == 0 || d.Slices.Compute > d.Slices.GPU) {
			err = errors.Join(err, fmt.Errorf("%s: %d slices, %d of compute", d.ID, d.Slices.GPU, d.Slices.Compute))
		}
	}
	r.check("nvml", "session of the agents, read twice", fmt.Sprintf("%d devices, %d connections", len(first.Devices), len(first.Links)), err)
	r.sources = append(r.sources, compare.OfSnapshot(first))
	for _, d := range first.Devices {
		if d.Profile == "" {
			r.GPUs = append(r.GPUs, d.Model)
		}
	}
	r.Driver, r.CUDA = first.Driver.Version, first.Driver.CUDA
}

// devices are the UUIDs that both agents list before they run, sorted.
func (r *run) devices() []string {
	var ids []string
	for id := range r.before[nomadGPU].Devices {
		if _, ok := r.before[k8sGPU].Devices[id]; ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// moduleUse is the use of the kernel module.
type moduleUse struct {
	count string   // of references to it; "" = unknown
	nodes []string // "123 nomad-gpu: /dev/nvidia0", of processes that this one can see
}

func (u moduleUse) String() string {
	text := "use count unknown"
	if u.count != "" {
		text = "use count " + u.count
	}
	if len(u.nodes) > 0 {
		text += "\nopen: " + strings.Join(u.nodes, "\nopen: ")
	}
	return text
}

// moduleUse reads the use count and the open device nodes.
func (r *run) moduleUse() (u moduleUse) {
	if text, err := os.ReadFile(filepath.Join(r.roots.Sys, "module/nvidia/refcnt")); err == nil {
		u.count = strings.TrimSpace(string(text))
	}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range processes {
		if open := r.openNodes(dir); len(open) > 0 {
			name, _ := os.ReadFile(dir + "/comm") // of a process that has ended it is empty
			u.nodes = append(u.nodes, fmt.Sprintf("%s %s: %s", filepath.Base(dir), strings.TrimSpace(string(name)), strings.Join(open, " ")))
		}
	}
	return u
}

// openNodes are the driver's device nodes that a process has open, each once.
func (r *run) openNodes(process string) (nodes []string) {
	entries, _ := os.ReadDir(process + "/fd") // without the right to read it, or of a process that has ended, there are none
	for _, e := range entries {
		path, err := os.Readlink(process + "/fd/" + e.Name())
		if err == nil && strings.HasPrefix(path, filepath.Join(r.roots.Dev, "dev/nvidia")) && !slices.Contains(nodes, path) {
			nodes = append(nodes, path)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// isInstance reports whether a device is a MIG instance.
func isInstance(id string) bool { return strings.HasPrefix(id, "MIG-") }

// libraryPath is the driver's library as the agents find it.
func (o options) libraryPath() string {
	if o.roots.Driver == "/" {
		return "libnvidia-ml.so.1"
	}
	for _, folder := range nvidia.LibraryFolders() {
		path := filepath.Join(o.roots.Driver, folder, "libnvidia-ml.so.1")
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	return "libnvidia-ml.so.1"
}

// hasDriver reports whether a report has a driver in use.
func hasDriver(state string) bool { return state == gpu.DriverReady.String() }
