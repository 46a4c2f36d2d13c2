// Numbers measures the built agents as whole processes, each under a small stand-in for its orchestrator,
// on a simulated machine: size on disk, resident memory, how soon the first list comes, and how long a
// reservation takes over the agent's real socket; and what an agent costs that has nothing to do.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/test/rig"
)

func main() {
	bin := flag.String("bin", "bin", "folder of nomad-gpu and k8s-gpu")
	machine := flag.String("machine", "h100x8", "simulated machine: a name or a file")
	n := flag.Int("n", 2000, "reservations to time")
	idle := flag.Duration("idle", time.Minute, "time to run with nothing to do, before memory is read")
	flag.Parse()
	if err := measure(context.Background(), *bin, *machine, *n, *idle); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// cost is what an agent takes in a minute of nothing happening.
type cost struct {
	what                  string
	cpu                   time.Duration
	calls, waits, batches float64 // driver calls: all, event waits, field batches
}

// figures are what was measured of one agent.
type figures struct {
	name      string
	size      int64
	pid       int
	rss, anon string // as /proc/PID/status has them
	first     time.Duration
	empty     []time.Duration // calls that do nothing: what gRPC and the kernel take
	took      []time.Duration // reservations

	rest, lost cost
}

func measure(ctx context.Context, bin, machine string, n int, idle time.Duration) error {
	dir, err := os.MkdirTemp("", "tandem-numbers-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	m, err := rig.FindMachine(ctx, filepath.Join(dir, "machine"), machine)
	if err != nil {
		return err
	}
	if m.Simulated == nil {
		return errors.New("the figures are of a simulated machine: name one with -machine")
	}
	r := run{machine: m, setup: rig.Setup{Roots: m.Roots, StateDir: filepath.Join(dir, "state")}, n: n, idle: idle}
	nomad, err := r.measureNomad(ctx, filepath.Join(bin, "nomad-gpu"))
	if err != nil {
		return err
	}
	kubelet, err := r.measureKubelet(ctx, dir, filepath.Join(bin, "k8s-gpu"))
	if err != nil {
		return err
	}
	fmt.Printf("machine %s; memory after %d reservations and %s\n\n", m.What, n, idle)
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\tbinary\tresident\tof it anonymous\tfirst list\treservation p50\tp99\tempty call p50\tp99")
	for _, f := range []figures{nomad, kubelet} {
		fmt.Fprintf(t, "%s\t%.1f MB\t%s\t%s\t%.0f ms\t%.0f us\t%.0f us\t%.0f us\t%.0f us\n", f.name, float64(f.size)/1e6,
			f.rss, f.anon, f.first.Seconds()*1e3, at(f.took, 0.50), at(f.took, 0.99), at(f.empty, 0.50), at(f.empty, 0.99))
	}
	fmt.Fprintln(t, "\na minute\tCPU\tdriver calls\tof them event waits\tfield batches")
	for _, f := range []figures{nomad, kubelet} {
		for _, c := range []cost{f.rest, f.lost} {
			fmt.Fprintf(t, "%s, %s\t%.0f ms (%.2f %%)\t%.0f\t%.0f\t%.0f\n", f.name, c.what,
				c.cpu.Seconds()*1e3, c.cpu.Minutes()*100, c.calls, c.waits, c.batches)
		}
	}
	return t.Flush()
}

// run is what all measurements have in common.
type run struct {
	machine rig.Machine
	setup   rig.Setup
	n       int
	idle    time.Duration
}

// leave lets the agent be, with all GPUs well and with one lost, and takes what that costs.
func (r run) leave(f *figures) (err error) {
	if f.rest, err = r.cost("all well", f.pid); err != nil {
		return err
	}
	slots, err := r.machine.Simulated.Slots()
	if err != nil {
		return err
	}
	one := slots[len(slots)/2]
	if err := r.machine.Simulated.Lose(one); err != nil {
		return err
	}
	f.lost, err = r.cost("one GPU lost", f.pid)
	return errors.Join(err, r.machine.Simulated.Restore(one))
}

// cost takes what an agent that is left alone costs a minute.
func (r run) cost(what string, pid int) (cost, error) {
	time.Sleep(12 * time.Second) // the end of what came before; more than the time between two checks
	before, cpu, err := r.spent(pid)
	if err != nil {
		return cost{}, err
	}
	time.Sleep(r.idle)
	after, cpuAfter, err := r.spent(pid)
	if err != nil {
		return cost{}, err
	}
	minute := func(v float64) float64 { return v / r.idle.Minutes() }
	c := cost{what: what, cpu: time.Duration(minute(float64(cpuAfter - cpu)))}
	for name, n := range after {
		n -= before[name]
		c.calls += minute(float64(n))
		switch {
		case strings.HasPrefix(name, "nvmlEventSetWait"):
			c.waits += minute(float64(n))
		case name == "nvmlDeviceGetFieldValues":
			c.batches += minute(float64(n))
		}
	}
	return c, nil
}

// spent is what a process has cost so far: driver calls by name, and CPU time (proc(5): utime and stime of
// /proc/PID/stat, in ticks of 10 ms).
func (r run) spent(pid int) (map[string]uint64, time.Duration, error) {
	calls, err := r.machine.Simulated.CallsOf(pid)
	if err != nil {
		return nil, 0, err
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, 0, err
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	fields := strings.Fields(rest)
	var ticks int
	for _, field := range fields[11:13] {
		n, err := strconv.Atoi(field)
		if err != nil {
			return nil, 0, err
		}
		ticks += n
	}
	return calls, time.Duration(ticks) * 10 * time.Millisecond, nil
}

// at is a quantile in microseconds.
func at(took []time.Duration, q float64) float64 {
	slices.Sort(took)
	return float64(took[int(q*float64(len(took)-1))].Nanoseconds()) / 1e3
}

// times calls f n times.
func times(n int, f func() error) ([]time.Duration, error) {
	took := make([]time.Duration, n)
	for i := range took {
		began := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		took[i] = time.Since(began)
	}
	return took, nil
}

func (r run) measureNomad(ctx context.Context, binary string) (figures, error) {
	f := figures{name: "nomad-gpu"}
	start := time.Now()
	client, err := rig.StartNomad(ctx, binary, r.setup, io.Discard)
	if err != nil {
		return f, err
	}
	defer client.Stop()
	if err := client.Await(ctx, "devices", func(seen map[string]rig.View) bool { return len(seen) > 0 }); err != nil {
		return f, err
	}
	f.first = time.Since(start)
	ids := firstTwo(client.Devices())
	if f.took, err = times(r.n, func() error { _, err := client.Reserve(ids...); return err }); err != nil {
		return f, err
	}
	if f.empty, err = times(r.n, client.Ping); err != nil {
		return f, err
	}
	if f.pid, err = strconv.Atoi(client.PID()); err != nil {
		return f, err
	}
	if err := r.leave(&f); err != nil {
		return f, err
	}
	return f, f.read(binary)
}

func (r run) measureKubelet(ctx context.Context, dir, binary string) (figures, error) {
	f := figures{name: "k8s-gpu"}
	start := time.Now()
	k, err := rig.StartKubelet(dir, binary, r.setup, io.Discard)
	if err != nil {
		return f, err
	}
	defer func() { _ = k.End() }()
	f.pid = k.PID()
	const resource = "nvidia.com/gpu"
	if err := k.Await(ctx, "devices", func() bool { d, _ := k.Devices(resource); return len(d) > 0 }); err != nil {
		return f, err
	}
	f.first = time.Since(start)
	ids := firstTwo(k.View(ctx))
	if f.took, err = times(r.n, func() error { _, err := k.Grant(ctx, resource, ids...); return err }); err != nil {
		return f, err
	}
	plugin, err := k.Plugin(resource)
	if err != nil {
		return f, err
	}
	if f.empty, err = times(r.n, func() error { _, err := plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); return err }); err != nil {
		return f, err
	}
	if err := r.leave(&f); err != nil {
		return f, err
	}
	return f, f.read(binary)
}

func firstTwo(seen map[string]rig.View) []string {
	var ids []string
	for id := range seen {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids[:min(2, len(ids))]
}

// read takes the size of the binary and the memory of the process.
func (f *figures) read(binary string) error {
	info, err := os.Stat(binary)
	if err != nil {
		return err
	}
	f.size = info.Size()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", f.pid))
	if err != nil {
		return err
	}
	for line := range bytes.Lines(status) {
		key, value, _ := strings.Cut(strings.TrimSpace(string(line)), ":")
		kb, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(value), " kB"))
		text := fmt.Sprintf("%.1f MiB", float64(kb)/1024)
		switch key {
		case "VmRSS":
			f.rss = text
		case "RssAnon":
			f.anon = text
		}
	}
	return nil
}
