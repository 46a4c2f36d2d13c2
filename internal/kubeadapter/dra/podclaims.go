package dra

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
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

// admission is what pods' claims mean for the devices of the node.
type admission struct {
	pending bool   // the kubelet has not answered yet
	foreign string // why no device may be given out; "" = nothing of other drivers, nothing lost
}

// text returns why no device takes new work; "" if they do.
func (v admission) text() string {
	if v.pending {
		return "the kubelet has not listed the claims of pods yet"
	}
	return v.foreign
}

const (
	pendingAtMost = 15 * time.Second // devices are kept back because the kubelet does not list the claims of pods
	pendingEvery  = 5 * time.Second  // between two queries at last while they are
)

// watchPods compares the prepared claims with those that pods have: often after the kubelet has registered the driver, then every minute
// while there are any, or something is wrong. It runs until ctx ends.
//
// A pod of another driver of this name keeps its device when that driver is replaced, under a device name that means nothing here: the
// new slices would offer its GPU as free. While there is one, no device takes new work. A claim with a name of this agent that is not
// in the records was prepared by this agent, and its record is lost: it is made again. Without PodClaims only the records are read again.
func (a *Adapter) watchPods(ctx context.Context, task *watchdog.Task) {
	defer task.Done()
	task.Heartbeat(a.limits.call)
	if _, err := a.awaitStore(ctx); err != nil {
		return
	}
	began, requested := time.Now(), time.Now()
	a.abandoned = map[string]time.Time{}
	reconcile.Loop{
		On: []reconcile.Source{reconcile.Signal(a.queries)}, Task: task, Limit: a.limits.queryFirst + a.limits.call,
	}.Run(ctx, func(ctx context.Context, cause reconcile.Cause) time.Duration {
		if cause == reconcile.Change {
			requested = time.Now()
		}
		if cause != reconcile.Start && !watch.Sleep(ctx, a.limits.queryFirst) {
			return reconcile.Never
		}
		a.queryPods(ctx, time.Since(began))
		wait := min(max(time.Since(requested), a.limits.queryFirst), a.limits.queryLast)
		switch {
		case !a.needsPods() && time.Since(requested) >= a.limits.queryActive:
			return reconcile.Never
		case a.admission.Load().pending:
			return min(wait, pendingEvery)
		}
		return wait
	})
}

// needsPods reports whether anything depends on what pods have.
func (a *Adapter) needsPods() bool {
	store := a.store.Load()
	return a.admission.Load().text() != "" || len(store.All()) > 0 || len(store.Unread()) > 0
}

// queryPods makes one query, a time after the first one.
func (a *Adapter) queryPods(ctx context.Context, elapsed time.Duration) {
	store := a.store.Load()
	if a.opts.PodClaims == nil {
		a.refresh(store)
		return
	}
	answer, problems, ok := a.queryKubelet(ctx, store, elapsed)
	if ok && len(problems) > 0 && a.admission.Load().foreign == "" && watch.Sleep(ctx, a.limits.queryFirst) {
		// A claim of the first answer may have ended meanwhile, and be deleted. Without a second answer the first one counts.
		if now, left, again := a.queryKubelet(ctx, store, elapsed); again {
			answer, problems = now, left
		} else if ctx.Err() == nil {
			a.setAdmission(answer, problems)
			return
		}
	}
	if !ok || ctx.Err() != nil {
		return
	}
	if left := a.unknownClaim(store); left != "" && answer.Partial && len(problems) == 0 && a.admission.Load().pending && elapsed < a.limits.partial {
		a.setProblems(problem.PodClaims, "devices are kept back: the kubelet has just started and may not know all pods, and "+left)
		return
	}
	a.setProblems(problem.PodClaims)
	a.setAdmission(answer, problems)
	a.removeAbandoned(ctx, store, answer)
}

// queryKubelet asks the kubelet once, and brings the records up to date with its answer. It returns a line for each claim because of which no device may be given
// out; ok is false without an answer.
func (a *Adapter) queryKubelet(ctx context.Context, store *prepared.Store, elapsed time.Duration) (answer PodClaims, problems []string, ok bool) {
	unread := store.Unread() // before the kubelet is asked, so that its answer is later
	limit, cancel := context.WithTimeout(ctx, a.limits.query)
	answer, err := a.opts.PodClaims(limit)
	cancel()
	if ctx.Err() != nil {
		return answer, nil, false
	}
	if err != nil {
		a.setProblems(problem.PodClaims, "the kubelet does not list the claims of pods, so that devices which pods of another driver have are not known: "+oneLine(err))
		if v := a.admission.Load(); v.pending && elapsed >= pendingAtMost {
			v.pending = false
			a.admission.Store(v)
		}
		return answer, nil, false
	}
	if !a.refresh(store) {
		return answer, nil, false
	}
	a.checkVanished(store, answer)
	problems = a.rebuildLost(ctx, store, answer)
	if len(problems) == 0 && !answer.Partial {
		a.setAsideUnread(store, unread)
	}
	return answer, append(problems, foreignClaims(store.All(), answer)...), true
}

// refresh reads what other processes have stored, and again what could not be read.
func (a *Adapter) refresh(store *prepared.Store) bool {
	err := store.Refresh()
	if err != nil {
		a.setProblems(problem.PreparedClaims, oneLine(err))
	} else {
		a.setProblems(problem.PreparedClaims)
	}
	return err == nil
}

// readOthers is refresh for calls and other goroutines: if a record can't be read, the kubelet is asked which claims pods have.
func (a *Adapter) readOthers(store *prepared.Store) error {
	err := store.Refresh()
	if len(store.Unread()) > 0 {
		watch.Notify(a.queries)
	}
	return err
}

// unknownClaim is a claim that pods may have and of which it is not known which devices it holds, in words; "" if there is none.
func (a *Adapter) unknownClaim(store *prepared.Store) string {
	if left := a.otherClaim(); left != "" {
		return left + " is of a claim of another driver"
	}
	for _, u := range store.Unread() {
		return u.String()
	}
	return ""
}

// otherClaim is the CDI specification of a claim that NVIDIA's driver has prepared in this boot and not unprepared; "" if there is none. The
// names are those of nvidia-dra-driver-gpu.
//
// The list of a kubelet that has just started may lack pods for some seconds, and can't be told from a complete one for two minutes. To keep
// the devices back for that time would delay each new and each rebooted node. Of the pods that may be missing, those with claims of this
// agent are in its records, and those of NVIDIA's driver have such a file; so only a node with one waits. What is not found: another
// driver of this name that writes no specifications, or into another folder, when kubelet and agent start at the same time.
func (a *Adapter) otherClaim() string {
	if a.opts.CDIFolder == "" {
		return ""
	}
	all, _ := filepath.Glob(filepath.Join(a.opts.CDIFolder, "k8s."+resourceslice.Driver+"-claim_*")) // fails on a bad pattern only
	if len(all) == 0 {
		return ""
	}
	return all[0]
}

// setAdmission publishes what the problems of an answer mean for new work. An answer that may lack pods ends no problem.
func (a *Adapter) setAdmission(answer PodClaims, problems []string) {
	v, before := admission{foreign: strings.Join(problems, "; ")}, a.admission.Load()
	if answer.Partial && v.foreign == "" && before.foreign != "" || before == v {
		return
	}
	if v.foreign != "" && v.foreign != before.foreign {
		a.opts.Log.Error("no device takes new work", "reason", v.foreign)
	}
	a.admission.Store(v)
}

// ownDeviceName matches the names of devices of this agent: lower-case UUIDs, with the number of a share. NVIDIA's driver has gpu-0 and
// gpu-0-mig-1g10gb-19-0.
var ownDeviceName = regexp.MustCompile(`^(gpu|mig)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(-s[0-9]+)?$`)

// foreignClaims returns a line for each claim of a pod that another driver of this name has prepared.
func foreignClaims(records []prepared.Claim, answer PodClaims) (lines []string) {
	for _, c := range answer.Claims {
		if c.Driver != resourceslice.Driver || ownDeviceName.MatchString(c.Device) || recordOf(records, c) {
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
func recordOf(records []prepared.Claim, p PodClaim) bool {
	return slices.ContainsFunc(records, func(c prepared.Claim) bool {
		return c.Namespace == p.Namespace && c.Name == p.Name &&
			slices.ContainsFunc(c.Results, func(r prepared.Result) bool { return r.Device == p.Device })
	})
}

// lost returns the claims of pods that this agent has prepared and that have no record, each with its devices.
func (a *Adapter) lost(store *prepared.Store, answer PodClaims) map[string][]PodClaim {
	all := map[string][]PodClaim{}
	for _, c := range answer.Claims {
		if c.Driver == resourceslice.Driver && ownDeviceName.MatchString(c.Device) && !recordOf(store.All(), c) {
			all[c.Namespace+"/"+c.Name] = append(all[c.Namespace+"/"+c.Name], c)
		}
	}
	return all
}
