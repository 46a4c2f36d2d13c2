package dra

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/holders"
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
	pending bool             // the kubelet has not answered yet, or may not have listed all pods
	awaited *prepared.Unread // the record for which devices wait for a complete list; nil = none
	foreign []obstacle       // why no device may be given out; nil = nothing of other drivers, nothing lost
	lost    []holders.Holder // claims of pods whose records can't be made again
}

// obstacle is a claim that keeps all devices from new work.
type obstacle struct{ namespace, text string }

// text returns why no device takes new work; "" if they do.
func (v admission) text() string {
	if v.pending && v.awaited != nil {
		return "the kubelet may not have listed all pods yet, and " + v.awaited.String()
	}
	if v.pending {
		return "the kubelet has not listed the claims of pods yet"
	}
	var lines []string
	for _, o := range v.foreign {
		lines = append(lines, o.text)
	}
	return strings.Join(lines, "; ")
}

// textFor is text for the event of a claim of a namespace: it names no claim of another one.
func (v admission) textFor(namespace string) string {
	if v.pending && v.awaited != nil {
		return "the kubelet may not have listed all pods yet, and " + unreadFor(*v.awaited, namespace)
	}
	if v.pending {
		return v.text()
	}
	var lines []string
	for _, o := range v.foreign {
		if o.namespace == namespace {
			lines = append(lines, o.text)
		}
	}
	if n := len(v.foreign) - len(lines); n > 0 {
		lines = append(lines, fmt.Sprintf("%d claims of other namespaces, which `k8s-gpu doctor` names", n))
	}
	return strings.Join(lines, "; ")
}

// lostBeside returns the holders of lost but for a claim.
func (v admission) lostBeside(ref claimRef) []holders.Holder {
	return slices.DeleteFunc(slices.Clone(v.lost), func(h holders.Holder) bool {
		return h.Work.Namespace == ref.namespace && h.Work.Claim == ref.name
	})
}

func (v admission) equal(o admission) bool {
	return v.pending == o.pending && (v.awaited == nil) == (o.awaited == nil) &&
		slices.Equal(v.foreign, o.foreign) && slices.Equal(v.lost, o.lost)
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
	return a.admission.Load().text() != "" || a.hasProblem() || len(store.All()) > 0 || len(store.Unread()) > 0
}

// queryPods makes one query, a time after the first one.
func (a *Adapter) queryPods(ctx context.Context, elapsed time.Duration) {
	store := a.store.Load()
	if a.opts.PodClaims == nil {
		a.refresh(store)
		return
	}
	found, ok := a.queryKubelet(ctx, store, elapsed)
	if ok && found.isProblem() && !a.hasProblem() && watch.Sleep(ctx, a.limits.queryFirst) {
		// A claim of the first answer may have ended meanwhile, and be deleted. Without a second answer the first one counts.
		if now, again := a.queryKubelet(ctx, store, elapsed); again {
			found = now
		} else if ctx.Err() == nil {
			a.setAdmission(store, found)
			return
		}
	}
	if !ok || ctx.Err() != nil {
		return
	}
	awaited, left := a.unknownClaim(store)
	v := a.admission.Load()
	incomplete := found.answer.Partial && elapsed < a.limits.partial
	if left != "" && incomplete && len(found.foreign) == 0 && v.pending {
		a.setProblems(problem.PodClaims, "devices are kept back: the kubelet has just started and may not know all pods, and "+left)
		if v.awaited = awaited; !v.equal(a.admission.Load()) {
			a.admission.Store(v)
		}
		return
	}
	a.setProblems(problem.PodClaims, found.lostTexts...)
	a.setAdmission(store, found)
	a.removeAbandoned(ctx, store, found.answer)
}

// found is what an answer of the kubelet shows.
type found struct {
	answer    PodClaims
	foreign   []obstacle
	lost      []holders.Holder // see admission
	lostTexts []string         // a line for each of their claims
}

func (f found) isProblem() bool { return len(f.foreign)+len(f.lost) > 0 }

// hasProblem reports whether the admission has anything that an answer has shown.
func (a *Adapter) hasProblem() bool {
	v := a.admission.Load()
	return len(v.foreign)+len(v.lost) > 0
}

// queryKubelet asks the kubelet once, and brings the records up to date with its answer. ok is false without an answer.
func (a *Adapter) queryKubelet(ctx context.Context, store *prepared.Store, elapsed time.Duration) (f found, ok bool) {
	unread := store.Unread() // before the kubelet is asked, so that its answer is later
	limit, cancel := context.WithTimeout(ctx, a.limits.query)
	answer, err := a.opts.PodClaims(limit)
	cancel()
	if ctx.Err() != nil {
		return f, false
	}
	if err != nil {
		a.setProblems(problem.PodClaims, "the kubelet does not list the claims of pods, so that devices which pods of another driver have are not known: "+oneLine(err))
		if v := a.admission.Load(); v.pending && elapsed >= pendingAtMost {
			v.pending, v.awaited = false, nil
			a.admission.Store(v)
		}
		return f, false
	}
	if !a.refresh(store) {
		return f, false
	}
	f.answer = answer
	a.checkVanished(store, answer)
	a.rebuildLost(ctx, store, &f)
	if !f.isProblem() && !answer.Partial {
		a.setAsideUnread(store, unread)
	}
	f.foreign = append(f.foreign, foreignClaims(store.All(), answer)...)
	return f, true
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

// unknownClaim is a claim that pods may have and that may hold any device, in words; "" if there is none. unread is its
// record, if it is of this agent. The GPUs that a damaged record names are held without this.
func (a *Adapter) unknownClaim(store *prepared.Store) (unread *prepared.Unread, text string) {
	if left := a.otherClaim(); left != "" {
		return nil, left + " is of a claim of another driver"
	}
	for _, u := range store.Unread() {
		if _, named := a.mayHold(u); !named {
			return &u, u.String()
		}
	}
	return nil, ""
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

// setAdmission publishes what an answer means for new work. An answer that may lack pods ends no problem.
func (a *Adapter) setAdmission(store *prepared.Store, f found) {
	v, before := admission{foreign: f.foreign, lost: f.lost}, a.admission.Load()
	if f.answer.Partial {
		if len(v.foreign) == 0 {
			v.foreign = before.foreign
		}
		for _, h := range before.lost {
			if !slices.Contains(v.lost, h) && !hasClaim(store.All(), h.Work) {
				v.lost = append(v.lost, h)
			}
		}
	}
	if v.equal(before) {
		return
	}
	if len(v.foreign) > 0 && !slices.Equal(v.foreign, before.foreign) {
		a.opts.Log.Error("no device takes new work", "reason", v.text())
	}
	a.admission.Store(v)
}

// hasClaim reports whether a claim has a record.
func hasClaim(records []prepared.Claim, w holders.Work) bool {
	return slices.ContainsFunc(records, func(c prepared.Claim) bool {
		return c.Namespace == w.Namespace && c.Name == w.Claim
	})
}

// ownDeviceName matches the names of devices of this agent: lower-case UUIDs, with the number of a share. NVIDIA's driver has gpu-0 and
// gpu-0-mig-1g10gb-19-0.
var ownDeviceName = regexp.MustCompile(`^(gpu|mig)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}(-s[0-9]+)?$`)

// foreignClaims returns each claim of a pod that another driver of this name has prepared.
func foreignClaims(records []prepared.Claim, answer PodClaims) (all []obstacle) {
	for _, c := range answer.Claims {
		if c.Driver != resourceslice.Driver || ownDeviceName.MatchString(c.Device) || recordOf(records, c) {
			continue
		}
		line := fmt.Sprintf("pod %s has device %s of claim %s/%s, which another driver %s has prepared: drain the node", c.Pod, c.Device, c.Namespace, c.Name, resourceslice.Driver)
		if one := (obstacle{c.Namespace, line}); !slices.Contains(all, one) {
			all = append(all, one)
		}
	}
	slices.SortFunc(all, func(a, b obstacle) int { return strings.Compare(a.text, b.text) })
	return all
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
