package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/node/mps/supervisor"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// endDaemonsAtMost is for how long mps-daemon ends daemons after a signal: less than the 30 s that Kubernetes and Nomad's clients give.
const endDaemonsAtMost = 20 * time.Second

// mountShm is the argument of mps-daemon for the container that runs before.
const mountShm = "mount-shm"

func (p Program) mpsDaemonVerb() verb {
	return verb{Name: "mps-daemon", ArgsUsage: "[" + mountShm + "]", MaxArgs: 1, Do: p.mpsDaemon,
		Usage: "run an MPS control daemon for each pool that the running agents of this node share by MPS, until a signal; with " + mountShm + " only mount the /dev/shm of daemons and pods"}
}

func (p Program) mpsDaemon(ctx context.Context, c *cli.Command) error {
	o, err := p.options(ctx)
	if err != nil {
		return err
	}
	if o.MPSRoot == "" {
		return command.Usagef("mps-daemon: want --mps-root, the folder of the MPS control daemons, such as %s", mps.DefaultRoot)
	}
	switch c.Args().First() {
	case mountShm:
		return supervisor.MountShm(o.MPSRoot, nomadShm(o))
	case "":
	default:
		return command.Usagef("mps-daemon: unknown argument %q: want %s, or none", c.Args().First(), mountShm)
	}
	if socket(o) == "" {
		return errors.New("mps-daemon: the pools are those of the running agent, which has no control socket: set state_dir")
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	// A signal to all processes of the program's name is for the agents: a new policy comes with their pools. Here it would end daemons that have clients.
	signal.Notify(make(chan os.Signal, 1), control.ReloadSignal)
	if p.StopWithin != nil {
		p.StopWithin(endDaemonsAtMost)
	}
	offers := map[string]func(context.Context) (supervisor.Offer, error){}
	for _, name := range ownership.Agents() {
		path := control.Path(o.Health.StateDir, name)
		offers[name] = func(ctx context.Context) (supervisor.Offer, error) { return agentOffer(ctx, path) }
	}
	supervisor.New(supervisor.Options{
		Root: o.MPSRoot, StateDir: o.Health.StateDir, Lock: filepath.Join(o.Health.StateDir, "mps-daemon.lock"),
		Offers: offers, Taken: func() (map[gpu.DeviceID]string, error) { return takenGPUs(o.Health.StateDir) },
		Hold: gpureset.NewLock(o.Health.StateDir).Hold, Log: p.log(),
	}).Run(ctx, endDaemonsAtMost)
	return nil
}

// takenGPUs returns the GPUs that agents have taken from all APIs, by the file of the node.
func takenGPUs(stateDir string) (map[gpu.DeviceID]string, error) {
	f, err := ownership.Read(stateDir)
	taken := map[gpu.DeviceID]string{}
	for id, mark := range f.Taken {
		taken[id] = mark.Agent
	}
	return taken, err
}

// nomadShm returns the folder that pods must have as their /dev/shm for one daemon to serve pods and Nomad's tasks, which have that of the
// node; "" on a node that has had no nomad-gpu.
func nomadShm(o agent.Options) string {
	if o.Name == ownership.NomadAgent || ownership.Recorded(o.Health.StateDir, ownership.NomadAgent) {
		return "/dev/shm"
	}
	return ""
}

// agentOffer returns what the agent with a control socket offers by MPS.
func agentOffer(ctx context.Context, path string) (offer supervisor.Offer, err error) {
	r, err := control.Report(ctx, path)
	switch {
	case errors.Is(err, control.ErrNotRunning):
		return offer, supervisor.ErrNoAgent
	case err != nil:
		return offer, err
	}
	offer.Pools, err = mpsPools(r)
	offer.Held = heldGPUs(r)
	return offer, err
}

// heldGPUs returns the GPUs that work has by the report of an agent, or may have. An agent that has just started shows
// no owners, and one with occupancy = off never does.
func heldGPUs(r report.Report) (held []gpu.DeviceID) {
	for _, d := range r.Devices {
		if len(d.Owners) > 0 || r.OwnersUnknown != nil || r.OwnersUnread {
			held = append(held, d.GPU)
		}
	}
	return held
}

// log is what a verb logs to that runs until a signal.
func (p Program) log() *slog.Logger {
	if p.Log != nil {
		return p.Log()
	}
	return slog.New(slog.NewTextHandler(p.Stderr, nil))
}

// mpsPools returns the pools that need a daemon by the report of an agent: none while an operator has released the driver. While the driver is
// not ready for another reason, such as the reset of a GPU, it is unknown which GPUs there are, and the daemons go on.
func mpsPools(r report.Report) ([]supervisor.Pool, error) {
	switch {
	case r.Driver.State == gpu.DriverReleased.String() && r.Driver.ResetOf == "":
		return nil, nil
	case r.Driver.State != gpu.DriverReady.String():
		return nil, fmt.Errorf("driver %s: %s", r.Driver.State, r.Driver.Reason)
	case r.Provisional:
		return nil, errors.New("the agent has just started")
	}
	notOffered := []string{health.ReasonWithdrawn.String(), health.ReasonOverlap.String()}
	replicas := map[gpu.DeviceID]int{}
	shared := slices.DeleteFunc(slices.Clone(r.Devices), func(d report.Device) bool {
		return d.Sharing != inventory.MPS.String() || slices.Contains(notOffered, d.Cause) || d.Replicas == 0
	})
	for _, d := range shared { // units with another health are listed apart
		replicas[d.ID] += d.Replicas
	}
	pools := map[string]supervisor.Pool{}
	for _, d := range shared {
		p := pools[d.Pool]
		p.Name, p.Threads = d.Pool, cmp.Or(d.MPSThreadPercent, 100/replicas[d.ID])
		p.Devices = append(p.Devices, supervisor.Device{ID: d.ID, MiB: cmp.Or(d.MPSMemoryBytes, d.MemoryBytes/uint64(replicas[d.ID])) >> 20}) //nolint:gosec // a number of units
		pools[d.Pool] = p
	}
	all := slices.Collect(maps.Values(pools))
	for i, p := range all {
		slices.SortFunc(p.Devices, func(a, b supervisor.Device) int { return cmp.Compare(a.ID, b.ID) })
		all[i].Devices = slices.Compact(p.Devices)
	}
	return all, nil
}
