// Numbers measures device plugins as whole processes, each under a small stand-in for its orchestrator, on a simulated machine or a real one: time
// to the first list, latency of calls over the plugin's real socket, memory, and the cost of an idle minute. Latencies are also given
// as ratios to a call on the same connection that does nothing, so that figures of different machines can be compared. With -peer
// another device plugin, or another version of an agent, is measured in alternation with the agent of the same API. With -fleet it measures gpu-fleet.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/test/rig"
)

func main() {
	var o options
	bin := flag.String("bin", "bin", "folder of nomad-gpu and k8s-gpu")
	peers := flag.String("peer", "", "other device plugins, or other versions of the agents, separated by commas")
	flag.StringVar(&o.machine, "machine", "h100x8", "simulated machine: a name or a file; empty: the GPUs of this node, of which none is lost and no driver call counted")
	flag.IntVar(&o.calls, "n", 2000, "calls of each kind to time")
	flag.IntVar(&o.runs, "runs", 3, "processes of each plugin; the figures are medians")
	flag.DurationVar(&o.idle, "idle", time.Minute, "time without a request, in which the cost of a minute is measured; 0: it is not")
	flag.DurationVar(&o.statistics, "stats", time.Second, "interval at which Nomad asks for statistics, 1s as a Nomad client unless configured; 0: it does not")
	fleet := flag.String("fleet", "", "measure gpu-fleet instead, with simulated servers of so many nodes: 100,1000,3000")
	flag.Parse()
	if *fleet != "" {
		end(o.measureFleet(context.Background(), *bin, *fleet))
		return
	}
	end(o.measure(context.Background(), *bin, strings.FieldsFunc(*peers, func(r rune) bool { return r == ',' })))
}

func end(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "numbers:", err)
		os.Exit(1)
	}
}

// options are those of the command line.
type options struct {
	machine     string
	calls, runs int
	idle        time.Duration
	statistics  time.Duration
}

// subject is a device plugin to measure.
type subject struct {
	name, binary string
	peer         bool   // not an agent of this project
	idle         string // what an idle minute of it is
	start        func(context.Context, rig.Setup, subject, string) (*process, error)
	runs         [][]figure
}

// ratio is the unit of a figure that is a ratio.
const ratio = "ratio"

// figure is one measured value.
type figure struct {
	name, unit string // "" = a number
	value      float64
}

// subjects are the agents, each with its peers after it.
func (o options) subjects(ctx context.Context, bin string, peers []string) [][]*subject {
	groups := [][]*subject{
		{{name: "nomad-gpu", binary: filepath.Join(bin, "nomad-gpu"), start: startNomad, idle: "idle minute, no statistics"}},
		{{name: "k8s-gpu", binary: filepath.Join(bin, "k8s-gpu"), start: startKubelet, idle: "idle minute"}},
	}
	if o.statistics > 0 {
		groups[0][0].idle = fmt.Sprintf("idle minute, statistics every %v", o.statistics)
	}
	for _, path := range peers {
		s, api := &subject{name: path, binary: path, start: startKubelet}, 1
		if isNomadPlugin(ctx, path) {
			s.start, api = startNomad, 0
		}
		s.peer, s.idle = filepath.Base(path) != groups[api][0].name, groups[api][0].idle
		groups[api] = append(groups[api], s)
	}
	return groups
}

func (o options) measure(ctx context.Context, bin string, peers []string) error {
	if o.runs < 1 || o.calls < 1 || o.idle < 0 || o.statistics < 0 {
		return errors.New("want 1 or more -runs and -n, and an -idle and -stats of 0 or more")
	}
	bin, err := filepath.Abs(bin) // a program without a folder in its path is looked for in $PATH
	if err != nil {
		return err
	}
	groups := o.subjects(ctx, bin, peers)
	for n := range o.runs {
		for _, group := range groups {
			order := slices.Clone(group)
			if n%2 == 1 {
				slices.Reverse(order) // none is always the first
			}
			for _, s := range order {
				fmt.Fprintf(os.Stderr, "run %d of %d: %s\n", n+1, o.runs, s.name)
				figures, err := o.run(ctx, s)
				if err != nil {
					return fmt.Errorf("%s: %w", s.name, err)
				}
				s.runs = append(s.runs, figures)
			}
		}
	}
	fmt.Printf("%s on %d CPUs, machine %s; medians of %d runs of %d calls and %v\n", runtime.Version(), runtime.NumCPU(), cmp.Or(o.machine, "of this node"), o.runs, o.calls, o.idle)
	for _, group := range groups {
		if err := print(group); err != nil {
			return err
		}
	}
	return nil
}

// run measures one process of a subject.
func (o options) run(ctx context.Context, s *subject) ([]figure, error) {
	dir, err := os.MkdirTemp("", "numbers") // a short path: it has sockets
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	m, err := rig.FindMachine(ctx, filepath.Join(dir, "machine"), o.machine)
	if err != nil {
		return nil, err
	}
	start := time.Now()
	p, err := s.start(ctx, rig.Setup{Roots: m.Roots, StateDir: filepath.Join(dir, "state"), Peer: s.peer, Statistics: o.statistics}, *s, dir)
	if err != nil {
		return nil, err
	}
	defer p.stop()
	first := time.Since(start)
	info, err := os.Stat(s.binary)
	if err != nil {
		return nil, err
	}
	figures := []figure{{"binary", "MB", float64(info.Size()) / 1e6}, {"start to first list", "ms", first.Seconds() * 1e3}}
	for _, callers := range []int{1, 16} {
		latencies, err := latencies(p.calls, callers, o.calls)
		if err != nil {
			return nil, err
		}
		figures = append(figures, latencies...)
	}
	var idle []figure
	if o.idle > 0 {
		if idle, err = o.idleMinutes(p, m.Simulated, s); err != nil {
			return nil, err
		}
	}
	memory, err := p.memory()
	return slices.Concat(figures, memory, idle), err
}
