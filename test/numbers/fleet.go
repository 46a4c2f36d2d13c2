package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tandem-gpu/tandem/internal/fleet/report"
	"github.com/tandem-gpu/tandem/test/bigfleet"
)

// servers are those of a cluster of which only the objects exist.
type servers interface {
	Config(dir, mode string) (string, error)
	Open()
	Close()
	Requests() map[string]int
	Sent() int64
	Acts() []time.Time
	Fail(node int, gpus ...int)
	Recover(node int, gpus ...int)
}

// fleetRun is one size of one orchestrator.
type fleetRun struct {
	name  string
	nodes int
	idle  time.Duration
	servers
	dir     string
	p       *fleetProcess
	figures []figure
}

// measureFleet measures gpu-fleet with simulated servers of each size, of both orchestrators at the same time.
func (o options) measureFleet(ctx context.Context, bin, sizes string) error {
	if o.idle < time.Minute {
		return errors.New("want an -idle of a minute or more")
	}
	var runs []*fleetRun
	for size := range strings.SplitSeq(sizes, ",") {
		n, err := strconv.Atoi(size)
		if err != nil || n < 10 {
			return fmt.Errorf("-fleet = %q: want numbers of nodes of 10 or more", sizes)
		}
		both := []*fleetRun{
			{name: fmt.Sprintf("Kubernetes, %d", n), nodes: n, idle: o.idle, servers: bigfleet.NewKube(n)},
			{name: fmt.Sprintf("Nomad, %d", n), nodes: n, idle: o.idle, servers: bigfleet.NewNomad(n)},
		}
		var group errgroup.Group
		for _, r := range both {
			group.Go(func() error {
				defer r.Close()
				if err := r.measure(ctx, filepath.Join(bin, "gpu-fleet")); err != nil {
					return fmt.Errorf("%s nodes: %w", r.name, err)
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		runs = append(runs, both...)
	}
	return printFleet(runs)
}

// printFleet prints one column a run. Requests that a run did not make are none.
func printFleet(runs []*fleetRun) error {
	t := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	header, names := "\n", []string{}
	for _, r := range runs {
		header += "\t" + r.name
		for i, f := range r.figures {
			if !slices.Contains(names, f.name) {
				before := 0
				if i > 0 {
					before = slices.Index(names, r.figures[i-1].name) + 1
				}
				names = slices.Insert(names, before, f.name)
			}
		}
	}
	fmt.Fprintln(t, header+"\t")
	for _, name := range names {
		line := name
		for _, r := range runs {
			text := ""
			if i := slices.IndexFunc(r.figures, func(f figure) bool { return f.name == name }); i >= 0 {
				text = r.figures[i].format(r.figures[i].value)
			}
			line += "\t" + text
		}
		fmt.Fprintln(t, line+"\t")
	}
	return t.Flush()
}

// zip is what a browser gets.
func zip(text []byte) []byte {
	var out bytes.Buffer
	z, err := gzip.NewWriterLevel(&out, gzip.BestSpeed)
	if err != nil {
		panic(err) // of a constant level
	}
	_, _ = z.Write(text) // a bytes.Buffer does not fail
	_ = z.Close()
	return out.Bytes()
}

func (r *fleetRun) add(name, unit string, value float64) {
	r.figures = append(r.figures, figure{name, unit, value})
}

// measure has a process in mode report read the fleet, be idle, and see one fault; then one in mode act see another one, and all GPUs fail.
func (r *fleetRun) measure(ctx context.Context, binary string) (err error) {
	if r.dir, err = os.MkdirTemp("", "numbers"); err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(r.dir) }()
	for _, part := range []func(context.Context, string) error{r.first, r.idleMinutes, r.listed, r.moved, r.allFaulty} {
		if err := part(ctx, binary); err != nil {
			if r.p != nil && r.p.cmd.ProcessState == nil {
				_ = r.p.end()
				err = fmt.Errorf("%w\n%s", err, r.p.log)
			}
			return err
		}
	}
	return r.p.end()
}

// first is the start: without an answer of the servers, and until all is read.
func (r *fleetRun) first(ctx context.Context, binary string) (err error) {
	if r.p, err = r.begin(ctx, binary, "report"); err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	if err := r.memory("start, no answer of the servers"); err != nil {
		return err
	}
	before, began := r.spent(), time.Now()
	r.Open()
	err = r.p.await(ctx, 5*time.Minute, func(d report.Document) bool { return r.readAll(d) })
	if err != nil {
		return err
	}
	r.add("first read: time", "s", time.Since(began).Seconds())
	r.cost("first read", before, 1)
	return r.memory("first read")
}

func (r *fleetRun) readAll(d report.Document) bool {
	return d.Leads && len(d.Clusters) == 1 && d.Clusters[0].Problem == "" && d.Clusters[0].Nodes == r.nodes
}

func (r *fleetRun) idleMinutes(context.Context, string) error {
	time.Sleep(30 * time.Second)
	before := r.spent()
	time.Sleep(r.idle)
	r.cost("idle minute", before, r.idle.Minutes())
	r.requests("idle minute", before, r.idle.Minutes())
	if err := r.memory(fmt.Sprintf("%v idle", r.idle)); err != nil {
		return err
	}
	if err := r.decision("idle", 3); err != nil {
		return err
	}
	return r.page("idle")
}

// listed is one fault in mode report.
func (r *fleetRun) listed(ctx context.Context, _ string) error {
	before, began := r.spent(), time.Now()
	r.Fail(1, 0)
	err := r.p.await(ctx, 5*time.Minute, func(d report.Document) bool {
		return slices.ContainsFunc(d.Counts.Acts, func(c report.ActCount) bool { return c.Answer == "listed" && c.Count > 0 })
	})
	if err != nil {
		return err
	}
	r.add("fault, mode report: until listed", "s", time.Since(began).Seconds())
	r.requests("fault, mode report", before, 1)
	if n := len(r.Acts()); n > 0 {
		return fmt.Errorf("%d calls in mode report", n)
	}
	if err := r.decision("one fault", 3); err != nil {
		return err
	}
	r.Recover(1, 0)
	return r.p.end()
}

// moved is one fault in mode act, until its work runs elsewhere.
func (r *fleetRun) moved(ctx context.Context, binary string) (err error) {
	if r.p, err = r.begin(ctx, binary, "act"); err != nil {
		return err
	}
	if err := r.p.await(ctx, 5*time.Minute, r.readAll); err != nil {
		return err
	}
	time.Sleep(15 * time.Second)
	before, began := r.spent(), time.Now()
	r.Fail(2, 0)
	err = r.p.await(ctx, 5*time.Minute, func(d report.Document) bool {
		return slices.ContainsFunc(d.Counts.Outcomes, func(c report.OutcomeCount) bool { return c.Count > 0 })
	})
	if err != nil {
		return err
	}
	if n := len(r.Acts()); n != 1 {
		return fmt.Errorf("%d calls for one fault", n)
	}
	r.add("fault: from the servers' word to the call", "s", r.Acts()[0].Sub(began).Seconds())
	r.add("fault: to the end of the move", "s", time.Since(began).Seconds())
	r.cost("fault", before, 1)
	r.requests("fault", before, 1)
	return nil
}

// allFaulty is a minute in which all GPUs fail; the policy then stops all acts.
func (r *fleetRun) allFaulty(ctx context.Context, _ string) error {
	before := r.spent()
	for n := range r.nodes {
		r.Fail(n, 0, 1, 2, 3, 4, 5, 6, 7)
	}
	time.Sleep(time.Minute)
	r.cost("first minute, all GPUs faulty", before, 1)
	r.requests("first minute, all GPUs faulty", before, 1)
	if err := r.memory("all GPUs faulty"); err != nil {
		return err
	}
	if err := r.decision("all GPUs faulty", 3); err != nil {
		return err
	}
	if n := len(r.Acts()); n != 1 {
		return fmt.Errorf("%d calls, though the quorum stops all", n)
	}
	if err := r.page("all GPUs faulty"); err != nil {
		return err
	}
	if err := r.memory("all GPUs faulty, page read"); err != nil {
		return err
	}
	d, err := r.p.document(ctx)
	if err == nil && d.Stop == nil {
		err = errors.New("all GPUs are faulty, and acts are not stopped")
	}
	return err
}

// spending is what was spent so far.
type spending struct {
	cpu      time.Duration
	requests map[string]int
	sent     int64
}

func (r *fleetRun) spent() spending {
	cpu, _ := cpuTime(r.p.pid) // 0: it has ended, which the next wait tells
	return spending{cpu, r.Requests(), r.Sent()}
}

func (r *fleetRun) cost(name string, before spending, times float64) {
	now := r.spent()
	r.add(name+": CPU", "ms", float64((now.cpu-before.cpu).Microseconds())/1e3/times)
	r.add(name+": received", "MB", float64(now.sent-before.sent)/1e6/times)
}

func (r *fleetRun) requests(name string, before spending, times float64) {
	now, sum := r.Requests(), 0
	i := len(r.figures)
	for _, what := range slices.Sorted(maps.Keys(now)) {
		if n := now[what] - before.requests[what]; n > 0 {
			sum += n
			r.add(name+": requests, "+what, "", float64(n)/times)
		}
	}
	r.figures = slices.Insert(r.figures, i, figure{name + ": requests", "", float64(sum) / times})
}

func (r *fleetRun) memory(name string) error {
	all, err := (&process{pid: r.p.pid}).memory()
	for _, f := range all[:2] {
		r.add(name+": "+f.name, f.unit, f.value)
	}
	if err != nil {
		return err
	}
	text, err := os.ReadFile((&process{pid: r.p.pid}).path("status"))
	_, rest, _ := strings.Cut(string(text), "\nVmHWM:")
	var kb float64
	_, _ = fmt.Sscan(rest, &kb) // 0: the kernel does not have it
	r.add(name+": most that was resident", "MiB", kb/1024)
	return err
}

// decision is the shortest of some decisions, as the others wait for a CPU.
func (r *fleetRun) decision(name string, n int) error {
	least := time.Hour.Seconds()
	for range n {
		d, err := r.p.document(context.Background())
		if err != nil {
			return err
		}
		least = min(least, d.DecisionSeconds)
		time.Sleep(6 * time.Second)
	}
	r.add("decision, "+name, "ms", least*1e3)
	return nil
}

// page is the document of the page, which is made once for each decision.
func (r *fleetRun) page(name string) error {
	least := time.Hour
	var text []byte
	for range 3 {
		time.Sleep(16 * time.Second) // for another decision
		before, err := cpuTime(r.p.pid)
		if err != nil {
			return err
		}
		if text, err = r.p.get(context.Background(), "/fleet.json"); err != nil {
			return err
		}
		after, err := cpuTime(r.p.pid)
		if err != nil {
			return err
		}
		least = min(least, after-before)
	}
	r.add("/fleet.json, "+name, "MB", float64(len(text))/1e6)
	r.add("/fleet.json, "+name+": compressed", "MB", float64(len(zip(text)))/1e6)
	r.add("/fleet.json, "+name+": CPU", "ms", float64(least.Microseconds())/1e3)
	return nil
}

// fleetProcess is a gpu-fleet that runs.
type fleetProcess struct {
	cmd *exec.Cmd
	pid int
	url string
	log *bytes.Buffer // to be read after its end
}

// begin starts gpu-fleet in a mode, with a ledger of its own in the cluster. What the cluster answers may come later.
func (r *fleetRun) begin(ctx context.Context, binary, mode string) (*fleetProcess, error) {
	cluster, err := r.Config(r.dir, mode)
	if err != nil {
		return nil, err
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	address := l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, err
	}
	name := cluster[strings.Index(cluster, "name: ")+6 : strings.Index(cluster, ",")]
	path := filepath.Join(r.dir, mode+".yaml")
	text := fmt.Sprintf("clusters: [%s]\nledger: {cluster: %s, name: %s}\npolicy: {delay: 0s}\nlisten: %q\n", cluster, name, mode, address)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return nil, err
	}
	p := &fleetProcess{url: "http://" + address, log: &bytes.Buffer{}, cmd: exec.CommandContext(ctx, binary, "--config", path)}
	p.cmd.Stderr = p.log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	p.pid = p.cmd.Process.Pid
	go p.initLedger(ctx, binary, path)
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		if _, err := p.get(ctx, "/healthz"); err == nil {
			return p, nil
		} else if time.Now().After(end) {
			return nil, errors.Join(fmt.Errorf("no answer: %w", err), p.end())
		}
	}
}

// initLedger creates the ledger as soon as the servers answer.
func (p *fleetProcess) initLedger(ctx context.Context, binary, path string) {
	for ctx.Err() == nil {
		_ = exec.CommandContext(ctx, binary, "--config", path, "init").Run() // it fails before the servers answer
		time.Sleep(time.Second)
		if d, err := p.document(ctx); err == nil && d.Leads && d.Ledger.Error == "" {
			return
		}
	}
}

func (p *fleetProcess) end() error {
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	if err := p.cmd.Wait(); err != nil {
		return fmt.Errorf("gpu-fleet: %w\n%s", err, p.log)
	}
	return nil
}

func (p *fleetProcess) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	text, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, text)
	}
	return text, err
}

func (p *fleetProcess) document(ctx context.Context) (d report.Document, err error) {
	text, err := p.get(ctx, "/fleet.json?nodes=brief")
	return d, cmp.Or(err, json.Unmarshal(text, &d))
}

func (p *fleetProcess) await(ctx context.Context, limit time.Duration, ok func(report.Document) bool) error {
	for end := time.Now().Add(limit); ; time.Sleep(100 * time.Millisecond) {
		d, err := p.document(ctx)
		switch {
		case err == nil && ok(d):
			return nil
		case time.Now().After(end):
			text, _ := json.Marshal(d)
			return errors.Join(fmt.Errorf("no such document within %v: %.3000s", limit, text), err)
		}
	}
}
