// Demo runs both agents as real processes on one machine, each under its orchestrator's protocol, and
// shows side by side what the two schedulers see when a GPU becomes unhealthy and recovers.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/tandem-gpu/tandem/test/rig"
)

const (
	nomadGPU = "nomad-gpu"
	k8sGPU   = "k8s-gpu"
)

// patience is how long each scheduler may take to see what happened.
const patience = 30 * time.Second

func main() {
	bin := flag.String("bin", "bin", "folder of nomad-gpu and k8s-gpu")
	name := flag.String("machine", "", "simulated machine to run on: a name or a file; default: the host's GPUs, else h100x8")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Stdout, *bin, *name)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "verdict: FAILED:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, bin, name string) (err error) {
	if bin, err = filepath.Abs(bin); err != nil { // a program without a folder in its path is looked for in $PATH
		return err
	}
	dir, err := os.MkdirTemp("", "tandem-demo-")
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			_ = os.RemoveAll(dir)
		} else {
			fmt.Fprintln(out, "logs are kept in", dir)
		}
	}()
	log, err := os.Create(filepath.Join(dir, "agents.log"))
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))

	m, err := rig.FindMachine(ctx, filepath.Join(dir, "machine"), name)
	if err != nil {
		return err
	}
	setup := rig.Setup{Roots: m.Roots, Policy: filepath.Join(dir, "policy.yaml"), Hasty: true}
	if err := os.WriteFile(setup.Policy, []byte(noPolicy), 0o644); err != nil {
		return err
	}
	// Each has its own: with one state directory each agent would report that the other offers the same GPUs.
	forNomad, forKubelet := setup, setup
	forNomad.StateDir, forKubelet.StateDir = filepath.Join(dir, nomadGPU), filepath.Join(dir, k8sGPU)
	n, err := rig.StartNomad(ctx, filepath.Join(bin, nomadGPU), forNomad, log)
	if err != nil {
		return err
	}
	defer n.Stop()
	k, err := rig.StartKubelet(dir, filepath.Join(bin, k8sGPU), forKubelet, log)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "machine    %s\nnomad-gpu  pid %s, under a Nomad plugin client\nk8s-gpu    pid %d, under a small kubelet\n",
		m.What, n.PID(), k.PID())

	d := demo{ctx: ctx, out: out, bin: bin, state: dir, policy: setup.Policy, machine: m, nomad: n, kubelet: k}
	err = d.play()
	if stopErr := k.End(); err == nil && stopErr != nil {
		err = fmt.Errorf("stopping k8s-gpu: %w", stopErr)
	}
	if err == nil {
		fmt.Fprintf(out, "\nverdict: ok, two schedulers and one verdict on %d device(s)%s, and one policy\n", d.devices,
			map[bool]string{true: ", before, during and after a loss and a memory error"}[m.Simulated != nil])
	}
	return err
}

// demo is the state of the demonstration.
type demo struct {
	ctx     context.Context
	out     io.Writer
	bin     string
	state   string // folder of the agents' state directories, which have their names
	policy  string
	machine rig.Machine
	nomad   *rig.Nomad
	kubelet *rig.Kubelet
	devices int // at the start
}

func (d *demo) play() error {
	if err := d.bothSee("devices, all healthy", func(seen map[string]rig.View) bool { return len(seen) > 0 && all(seen, healthy) }); err != nil {
		return err
	}
	d.devices = len(d.nomad.Devices())
	d.show("What each scheduler sees")
	fmt.Fprintln(d.out, "\n  Nomad schedules on these attributes:")
	for _, line := range d.nomad.Attributes() {
		fmt.Fprintln(d.out, "    "+line)
	}
	if err := d.grants(); err != nil {
		return err
	}
	if d.machine.Simulated != nil {
		if err := d.loseOne(); err != nil {
			return err
		}
		if err := d.breakOne(); err != nil {
			return err
		}
	}
	return d.share()
}

// grants makes one reservation each.
func (d *demo) grants() error {
	ids := d.ids()
	fromNomad, err := d.nomad.Reserve(ids[0])
	if err != nil {
		return fmt.Errorf("nomad: reserve %s: %w", ids[0], err)
	}
	last := d.kubelet.View(d.ctx)[ids[len(ids)-1]]
	fromKubelet, err := d.kubelet.Grant(d.ctx, last.Name, last.ID)
	if err != nil {
		return fmt.Errorf("kubelet: allocate %s: %w", last.ID, err)
	}
	fmt.Fprintln(d.out, "\nWhat a container would get")
	d.printGrant("Nomad task", ids[0], fromNomad)
	d.printGrant("Kubernetes pod", last.ID, fromKubelet)
	for id, g := range map[string]rig.Grant{ids[0]: fromNomad, last.ID: fromKubelet} {
		if g.Env["NVIDIA_VISIBLE_DEVICES"] != id {
			return fmt.Errorf("asked for %s and got %v", id, g.Env)
		}
	}
	return nil
}

func (d *demo) printGrant(who, id string, g rig.Grant) {
	fmt.Fprintf(d.out, "  %s that asks for %s\n", who, id)
	for key, value := range g.Env {
		fmt.Fprintf(d.out, "    env     %s=%s\n", key, value)
	}
	fmt.Fprintf(d.out, "    device  %s\n", strings.Join(g.Nodes, ", "))
}

// bothSee waits until ok holds on both sides and they list the same devices with the same health. What a pod may hold stays in a kubelet's
// list as unhealthy after its pool is gone: that is left out.
func (d *demo) bothSee(what string, ok func(map[string]rig.View) bool) error {
	ctx, cancel := context.WithTimeout(d.ctx, patience)
	defer cancel()
	if err := d.nomad.Await(ctx, what, ok); err != nil {
		return err
	}
	return d.kubelet.AwaitView(ctx, what, func(seen map[string]rig.View) bool {
		theirs := d.nomad.Devices()
		maps.DeleteFunc(seen, func(id string, v rig.View) bool { return theirs[id].ID == "" && !v.Healthy })
		return ok(seen) && len(seen) == len(theirs) && all(seen, func(v rig.View) bool {
			return theirs[v.ID].Healthy == v.Healthy && theirs[v.ID].ID == v.ID
		})
	})
}

func healthy(v rig.View) bool { return v.Healthy }

func all(seen map[string]rig.View, ok func(rig.View) bool) bool {
	for _, v := range seen {
		if !ok(v) {
			return false
		}
	}
	return true
}

// ids are the devices in the order of their PCI addresses.
func (d *demo) ids() []string {
	seen := d.nomad.Devices()
	ids := make([]string, 0, len(seen))
	for id := range seen {
		ids = append(ids, id)
	}
	slices.SortFunc(ids, func(a, b string) int {
		return strings.Compare(seen[a].Where+a, seen[b].Where+b)
	})
	return ids
}

func (d *demo) show(title string) {
	fmt.Fprintln(d.out, "\n"+title)
	nomads, kubelets := d.nomad.Devices(), d.kubelet.View(d.ctx)
	t := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  device\tPCI\tNomad\thealth\tKubernetes\thealth\ttopology\treason")
	for _, id := range d.ids() {
		n, k := nomads[id], kubelets[id]
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", id, n.Where, n.Name, word(n), k.Name, word(k), k.Where, k.Reason)
	}
	_ = t.Flush()
}

func word(v rig.View) string {
	if v.Healthy {
		return "healthy"
	}
	return "UNHEALTHY"
}
