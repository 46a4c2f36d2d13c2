package draadapter

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/draadapter/prepared"
	"github.com/tandem-gpu/tandem/internal/draadapter/resourceslice"
	"github.com/tandem-gpu/tandem/internal/watch"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// PodClaims are the devices that pods have through claims, as the kubelet lists them (pod-resources API).
type PodClaims struct {
	Claims  []PodClaim
	Partial bool // pods may be missing: the kubelet has just started
}

// PodClaim is a device that a pod has through a claim.
type PodClaim struct {
	Pod             string // "NAMESPACE/NAME"
	Namespace, Name string // of the claim
	Driver          string
	Pool, Device    string
	CDI             []string // qualified names of its CDI devices
}

// verdict is what pods' claims mean for the devices of the node.
type verdict struct {
	pending bool   // the kubelet has not answered yet
	foreign string // why no device may be given out; "" = nothing of other drivers, nothing lost
}

// text returns why no device takes new work; "" if they do.
func (v verdict) text() string {
	if v.pending {
		return "the kubelet has not listed the claims of pods yet"
	}
	return v.foreign
}

// pendingAtMost is how long devices are kept back because the kubelet does not list the claims of pods.
const pendingAtMost = 15 * time.Second

// watchPods compares the prepared claims with those that pods have: often after the kubelet has registered the driver, then every minute
// while there are any, or something is wrong. It runs until ctx ends.
//
// A pod of another driver of this name keeps its device when that driver is replaced, under a device name that means nothing here: the
// new slices would offer its GPU as free. While there is one, no device takes new work. A claim with a name of this agent that is not
// in the records was prepared by this agent, and its record is lost: it is made again.
func (a *Adapter) watchPods(ctx context.Context, task *watchdog.Task) {
	defer task.Done()
	task.Heartbeat(a.limits.call)
	if _, err := a.awaitStore(ctx); err != nil {
		return
	}
	began, requested := time.Now(), time.Now()
	a.abandoned = map[string]time.Time{}
	for {
		task.Heartbeat(a.limits.call)
		a.queryPods(ctx, time.Since(began) >= pendingAtMost)
		var due <-chan time.Time
		wait := min(max(time.Since(requested), a.limits.queryFirst), a.limits.queryLast)
		if active := a.guard.Load().text() != "" || len(a.store.Load().All()) > 0 || time.Since(requested) < a.limits.queryActive; active {
			due = time.After(wait)
			task.Heartbeat(wait)
		} else {
			task.Heartbeat(0)
		}
		select {
		case <-a.queries:
			requested = time.Now()
		case <-due:
		case <-ctx.Done():
			return
		}
		if !watch.Sleep(ctx, a.limits.queryFirst) {
			return
		}
	}
}

// queryPods makes one query. late means that devices are not kept back any longer if it fails.
func (a *Adapter) queryPods(ctx context.Context, late bool) {
	store := a.store.Load()
	limit, cancel := context.WithTimeout(ctx, a.limits.query)
	answer, err := a.opts.PodClaims(limit)
	cancel()
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		a.setWarnings("claims of pods", []string{"the kubelet does not list the claims of pods, so that devices which pods of another driver have are not known: " + oneLine(err)})
		if v := a.guard.Load(); v.pending && late {
			v.pending = false
			a.guard.Store(v)
		}
		return
	}
	a.setWarnings("claims of pods", nil)
	if err := store.Refresh(); err != nil {
		a.setWarnings("state", []string{oneLine(err)})
		return
	}
	a.settleVanished(store, answer)
	problems := a.rebuildLost(ctx, store, answer)
	a.judge(answer, append(problems, foreignClaims(store.All(), answer)...))
	a.collect(ctx, store, answer)
}

// judge publishes what the problems of an answer mean for new work. An answer that may lack pods ends no problem.
func (a *Adapter) judge(answer PodClaims, problems []string) {
	v, before := verdict{foreign: strings.Join(problems, "; ")}, a.guard.Load()
	if answer.Partial && v.foreign == "" && before.foreign != "" || before == v {
		return
	}
	if v.foreign != "" && v.foreign != before.foreign {
		a.opts.Log.Error("no device takes new work", "reason", v.foreign)
	}
	a.guard.Store(v)
}

// ownName matches the names of devices of this agent: lower-case UUIDs, with the number of a share. NVIDIA's driver has gpu-0 and
// gpu-0-mig-1g10gb-19-0.
var ownName = regexp.MustCompile(`^(gpu|mig)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(-s[0-9]+)?$`)

// foreignClaims returns a line for each claim of a pod that another driver of this name has prepared.
func foreignClaims(held []prepared.Claim, answer PodClaims) (lines []string) {
	for _, c := range answer.Claims {
		if c.Driver != resourceslice.Driver || ownName.MatchString(c.Device) || recordOf(held, c) {
			continue
		}
		line := fmt.Sprintf("pod %s has device %s of claim %s/%s, which another driver %s has prepared: drain the node", c.Pod, c.Device, c.Namespace, c.Name, resourceslice.Driver)
		if !slices.Contains(lines, line) {
			lines = append(lines, line)
		}
	}
	slices.Sort(lines)
	return lines
}

// recordOf reports whether a record has the device of a pod's claim.
func recordOf(held []prepared.Claim, p PodClaim) bool {
	return slices.ContainsFunc(held, func(c prepared.Claim) bool {
		return c.Namespace == p.Namespace && c.Name == p.Name &&
			slices.ContainsFunc(c.Results, func(r prepared.Result) bool { return r.Device == p.Device })
	})
}

// lost returns the claims of pods that this agent has prepared and that have no record, each with its devices.
func (a *Adapter) lost(store *prepared.Store, answer PodClaims) map[string][]PodClaim {
	all := map[string][]PodClaim{}
	for _, c := range answer.Claims {
		if c.Driver == resourceslice.Driver && ownName.MatchString(c.Device) && !recordOf(store.All(), c) {
			all[c.Namespace+"/"+c.Name] = append(all[c.Namespace+"/"+c.Name], c)
		}
	}
	return all
}
