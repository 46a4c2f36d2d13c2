//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// kubeRescue is a Kubernetes of two nodes whose agents hand faults over, and gpu-fleet with no more rights than deploy/gpu-fleet has.
type kubeRescue struct {
	*cluster
	gpuFleet
	machine, other *simdriver.Machine // of node1 and node2
	second         *kubeNode
	servers        *recorder
	targets        *view // the pods with the condition DisruptionTarget
}

// Requests that end pods.
const (
	evictions = `^POST /api/v1/namespaces/[^/]+/pods/[^/]+/eviction`
	deletions = `^DELETE `
)

// TestRescueKubernetes has pods of each kind of owner leave faulty GPUs, and no other pods.
func TestRescueKubernetes(t *testing.T) {
	k := startKubeRescue(t)
	step(t, "faults under pods of each owner", k.moves)
	step(t, "a disruption budget allows no eviction, then it does", k.blocked)
	step(t, "the pod is another one of the same name when the eviction comes", k.replaced)
	step(t, "gpu-fleet is killed between the eviction and its answer", k.killed)
	step(t, "agents are updated, and the driver is unloaded on all nodes", k.withoutDriver)
	k.process.stop(t, syscall.SIGTERM)
	if calls := k.servers.matching(deletions, time.Time{}); len(calls) > 0 {
		t.Errorf("gpu-fleet deleted: %+v", calls)
	}
	t.Logf("what gpu-fleet asked of the servers, with the status of the answers:\n%s", k.servers.kinds())
	step(t, "gpu-fleet as deploy has it, and what it and the agents may do", k.privileges)
	checkDriver(t, k.machine)
	checkDriver(t, k.other)
}

func startKubeRescue(t *testing.T) *kubeRescue {
	t.Helper()
	k := &kubeRescue{machine: install(t, "h100x8"), cluster: startCluster(t, pluginImage(), fleetImage())}
	k.second, k.other = k.addNode(t, containerd2, "l40s")
	k.deployPlugin(t, k.machine.Root, "k8s-history", shippedPart(t, "hand-over"))
	k.awaitGPUs(t, 8, 8)
	k.second.awaitGPUs(t, 8, 8)
	k.age(t)
	k.second.age(t)
	k.servers = record(t, kubeAPI)
	k.targets = follow(t, "the pods with DisruptionTarget", k.disrupted)
	k.gpuFleet = gpuFleet{
		owner:    t,
		clusters: []map[string]any{{"name": "east", "kind": "kubernetes", "kubeconfig": k.fleetAccount(t, k.servers.url)}},
		ledger:   map[string]any{"cluster": "east"},
	}
	return k
}

// fleetAccount makes the account of gpu-fleet as deploy has it, and returns a kubeconfig with its token and this address of the servers.
func (c *cluster) fleetAccount(t *testing.T, address string) string {
	t.Helper()
	const shipped = "../../deploy/gpu-fleet/"
	must(t, "kubectl", "apply", "-f", shipped+"namespace.yaml", "-f", shipped+"access.yaml", "-f", shipped+"act/access.yaml")
	token := must(t, "kubectl", "create", "token", "gpu-fleet", "--namespace=gpu-fleet", "--duration=2h")
	return write(t, "gpu-fleet/kubeconfig", fmt.Appendf(nil, `{apiVersion: v1, kind: Config, current-context: e2e, contexts: [{name: e2e, context: {cluster: e2e, user: gpu-fleet}}],
		clusters: [{name: e2e, cluster: {server: %q, insecure-skip-tls-verify: true}}], users: [{name: gpu-fleet, user: {token: %q}}]}`, address, token))
}

// disrupted lists the pods with the condition DisruptionTarget, by their UIDs, and its reason.
func (c *cluster) disrupted() (string, error) {
	var list struct {
		Items []struct {
			Metadata struct{ UID string }
			Status   struct {
				Conditions []struct{ Type, Status, Reason string }
			}
		}
	}
	err := c.get("/api/v1/namespaces/default/pods", &list)
	var lines []string
	for _, p := range list.Items {
		for _, condition := range p.Status.Conditions {
			if condition.Type == "DisruptionTarget" && condition.Status == "True" {
				lines = append(lines, p.Metadata.UID+" "+condition.Reason)
			}
		}
	}
	return sorted(lines), err
}

// kubeWorkload is an object that makes pods with one GPU each.
type kubeWorkload struct {
	name, api, kind string
	spec            string // lines
	restart         string
}

func (w kubeWorkload) apply(t *testing.T) {
	t.Helper()
	must(t, "kubectl", "apply", "-f", render(t, "rescue/work.yaml", map[string]string{
		"NAME": w.name, "API": w.api, "KIND": w.kind, "SPEC": strings.ReplaceAll(w.spec, "\n", "\n  "), "RESTART": w.restart,
	}))
}

// deployment and the others are workloads by their kinds.
func deployment(name string, count int) kubeWorkload {
	return kubeWorkload{name, "apps/v1", "Deployment", fmt.Sprintf("replicas: %d\nselector: {matchLabels: {app: %s}}", count, name), "Always"}
}

func statefulSet(name string) kubeWorkload {
	return kubeWorkload{name, "apps/v1", "StatefulSet", fmt.Sprintf("replicas: 1\nserviceName: %s\nselector: {matchLabels: {app: %s}}", name, name), "Always"}
}

func daemons(name string) kubeWorkload {
	return kubeWorkload{name, "apps/v1", "DaemonSet", fmt.Sprintf("selector: {matchLabels: {app: %s}}", name), "Always"}
}

func batchJob(name, spec string) kubeWorkload {
	return kubeWorkload{name, "batch/v1", "Job", "backoffLimit: 0\n" + spec, "Never"}
}

// ignoring has a Job not count pods that were evicted.
const ignoring = "podFailurePolicy: {rules: [{action: Ignore, onPodConditions: [{type: DisruptionTarget}]}]}"

// moves has a GPU of a pod of each owner fail, all at once: two owners replace it elsewhere, and for three nothing is done.
func (k *kubeRescue) moves(t *testing.T) {
	for _, w := range []kubeWorkload{deployment("train", 2), batchJob("batch", ignoring), batchJob("once", ""), daemons("every")} {
		w.apply(t)
	}
	podOn(t, "bare", k.kubeNode, 1)
	places := map[string][]place{}
	for name, count := range map[string]int{"train": 2, "batch": 1, "once": 1, "every": 2} {
		places[name] = awaitPlaces(t, k.kubeWork(name), count)
	}
	bare, _ := k.awaitWork(t, "bare", 1)
	places["bare"] = []place{{bare.Metadata.UID, "bare", bare.Spec.NodeName, firstOf(bare.ids())}}

	k.configure(t, "act", settings(nil))
	k.verb(t, "init")
	k.start(t)
	for _, all := range places { // all on node1, so that the places on node2 are certain
		slices.SortFunc(all, func(a, b place) int { return strings.Compare(a.node, b.node) })
		failGPU(t, k.machineOf(all[0]), all[0].gpu)
	}
	refused := map[string]rescue.Reason{"once": rescue.ReasonAttempt, "every": rescue.ReasonController, "bare": rescue.ReasonController}
	k.checkEvicted(t, "train", places["train"])
	k.checkEvicted(t, "batch", places["batch"])
	for name, reason := range refused {
		k.awaitRefusal(t, places[name][0], reason)
	}
	for _, name := range []string{"once", "every"} {
		if now := awaitPlaces(t, k.kubeWork(name), len(places[name])); !sameIDs(now, places[name]) {
			t.Errorf("%s runs in %+v, and ran in %+v", name, now, places[name])
		}
	}
	k.awaitUnchanged(t, "bare", bare)
	var job struct{ Status struct{ Failed, Active int } }
	if err := k.get("/apis/batch/v1/namespaces/default/jobs/batch", &job); err != nil || job.Status.Failed != 0 || job.Status.Active != 1 {
		t.Errorf("Job batch has %+v, error %v; want the eviction not to count", job.Status, err)
	}
	must(t, "kubectl", "delete", "job/once", "daemonset/every", "pod/bare", "job/batch")
}

// checkEvicted waits until one pod of the workload was evicted and another one runs on another GPU, and fails unless that was by one request with
// the UID of the pod, the pod had the condition DisruptionTarget, and all other pods are as they were.
func (k *kubeRescue) checkEvicted(t *testing.T, app string, before []place) {
	t.Helper()
	bad := before[0]
	_, m := k.awaitOutcome(t, bad, rescue.Moved)
	t.Logf("%s moved: %s", bad.name, shown(m))
	now := awaitPlaces(t, k.kubeWork(app), len(before))
	fresh := slices.DeleteFunc(slices.Clone(now), func(p place) bool { return has(before, p) })
	if has(now, bad) || len(fresh) != 1 || fresh[0].gpu == bad.gpu {
		t.Errorf("it ran in %+v, it runs in %+v; want %+v replaced", before, now, bad)
	}
	calls := k.servers.matching("/pods/"+bad.name+"/eviction", time.Time{})
	if len(calls) != 1 || calls[0].status != http.StatusCreated || !strings.Contains(calls[0].body, bad.id) {
		t.Errorf("gpu-fleet evicted it by %+v, want one with its UID %s", calls, bad.id)
	}
	k.checkTarget(t, bad)
}

// checkTarget fails unless the pod was seen with the condition DisruptionTarget before it was gone.
func (k *kubeRescue) checkTarget(t *testing.T, at place) {
	t.Helper()
	want := at.id + " EvictionByEvictionAPI"
	seen := k.targets.since(time.Time{})
	if !slices.ContainsFunc(seen, func(lines string) bool { return strings.Contains(lines, want) }) {
		t.Errorf("pod %s was never seen with DisruptionTarget; seen were %q", at.name, seen)
	}
}

// guard has a disruption budget that allows no disruption.
func guard(t *testing.T, app string) {
	t.Helper()
	must(t, "kubectl", "create", "poddisruptionbudget", app, "--selector=app="+app, "--min-available=100%")
}

// liftedWithin is how long after a disruption budget is lifted its pod is gone at most: 15 s, and what a machine that runs other tests adds.
const liftedWithin = 20 * time.Second

func (k *kubeRescue) blocked(t *testing.T) {
	guard(t, "train")
	before := awaitPlaces(t, k.kubeWork("train"), 2)
	bad := before[0]
	failGPU(t, k.machineOf(bad), bad.gpu)
	wait := k.awaitWait(t, bad, rescue.ReasonBlocked)
	if !strings.Contains(wait.Text, "PodDisruptionBudget train") {
		t.Errorf("the wait is for %q", wait.Text)
	}
	evicts := "/pods/" + bad.name + "/eviction"
	await(t, "a second try", 30*time.Second, func() error {
		if calls := k.servers.matching(evicts, time.Time{}); len(calls) < 2 || calls[1].status == 0 {
			return fmt.Errorf("they are %+v", calls)
		}
		return nil
	})
	for _, call := range k.servers.matching(evicts, time.Time{}) {
		if call.status != http.StatusTooManyRequests {
			t.Errorf("an eviction: %+v", call)
		}
	}
	if now := awaitPlaces(t, k.kubeWork("train"), 2); !sameIDs(now, before) {
		t.Errorf("it runs in %+v, and ran in %+v", now, before)
	}
	lifted := time.Now()
	must(t, "kubectl", "delete", "poddisruptionbudget", "train")
	await(t, "the pod to be gone", liftedWithin, func() error {
		pods, err := k.podsOf("train")
		if slices.ContainsFunc(pods, func(p pod) bool { return p.Metadata.UID == bad.id }) {
			err = errors.New("it is there")
		}
		return err
	})
	t.Logf("gone %v after the budget was lifted", time.Since(lifted).Round(10*time.Millisecond))
	if r, m := k.awaitOutcome(t, bad, rescue.Moved); m.Tries < 3 || len(r.Moves) != 1 {
		t.Errorf("the rescue is %s", shown(r))
	}
	k.checkTarget(t, bad)
}

// machineOf is the machine of a pod's node.
func (k *kubeRescue) machineOf(at place) *simdriver.Machine {
	return map[string]*simdriver.Machine{"node1": k.machine, "node2": k.other}[at.node]
}

// replaced has the pod deleted and made anew by its StatefulSet between gpu-fleet's request and the servers.
func (k *kubeRescue) replaced(t *testing.T) {
	statefulSet("db").apply(t)
	w := k.kubeWork("db")
	bad := awaitPlaces(t, w, 1)[0]
	must(t, "kubectl", "create", "poddisruptionbudget", "db", "--selector=app=db", "--max-unavailable=1")
	var fresh pod
	var err error
	done := k.servers.meddleWith("/pods/db-0/eviction", func() bool {
		err = try("kubectl", "delete", "pod", "db-0", "--force", "--grace-period=0")
		for limit := time.Now().Add(8 * time.Second); time.Now().Before(limit); time.Sleep(50 * time.Millisecond) {
			if fresh, _ = k.pod("db-0"); fresh.Metadata.UID != "" && fresh.Metadata.UID != bad.id {
				return true
			}
		}
		return true
	}, nil)
	failGPU(t, k.machineOf(bad), bad.gpu)
	k.awaitDone(t, "gpu-fleet to evict pod db-0", done)
	if err != nil || fresh.Metadata.UID == "" || fresh.Metadata.UID == bad.id {
		t.Fatalf("the StatefulSet has made %+v in place of %+v, error %v", fresh.Metadata, bad, err)
	}
	k.awaitOutcome(t, bad, rescue.EndedItself, rescue.Moved) // the latter if its end is seen before the answer
	calls := k.servers.matching("/pods/db-0/eviction", time.Time{})
	if len(calls) != 1 || calls[0].status != http.StatusConflict {
		t.Errorf("the evictions are %+v; want one, refused because of the UID", calls)
	}
	if now := awaitPlaces(t, w, 1)[0]; now.id != fresh.Metadata.UID || now.gpu == bad.gpu {
		t.Errorf("pod db-0 is %+v; want %s, on another GPU than %s", now, fresh.Metadata.UID, bad.gpu)
	}
	must(t, "kubectl", "delete", "statefulset/db", "poddisruptionbudget/db")
}

// killed has gpu-fleet killed when the servers have evicted the pod, and gpu-fleet does not know it.
func (k *kubeRescue) killed(t *testing.T) {
	before := awaitPlaces(t, k.kubeWork("train"), 2)
	bad, began := before[0], time.Now()
	done := k.servers.meddleWith("/pods/"+bad.name+"/eviction", nil, k.kill)
	failGPU(t, k.machineOf(bad), bad.gpu)
	k.awaitDone(t, "gpu-fleet to evict "+bad.name, done)
	k.start(t)
	k.awaitOutcome(t, bad, rescue.Moved)
	if calls := k.servers.matching(evictions, began); len(calls) != 1 || calls[0].status != http.StatusCreated {
		t.Errorf("the evictions are %+v, want one", calls)
	}
	if d, err := k.document(); err != nil || len(rescuesOf(d, bad)) != 1 {
		t.Errorf("the attempts are %s, error %v; want one", shown(rescuesOf(d, bad)), err)
	}
}

// withoutDriver has what looks like a fault of all GPUs, and is none of any.
func (k *kubeRescue) withoutDriver(t *testing.T) {
	repairAll(t, k.machine, k.other)
	k.awaitGPUs(t, 8, 8)
	k.second.awaitGPUs(t, 8, 8)
	deployment("train", 8).apply(t)
	before, began := awaitPlaces(t, k.kubeWork("train"), 8), time.Now()
	must(t, "kubectl", "rollout", "restart", daemonSet, "--namespace=kube-system")
	awaitRollout(t)
	k.awaitGPUs(t, 8, 8)
	if err := errors.Join(k.machine.Unload(), k.other.Unload()); err != nil {
		t.Fatal(err)
	}
	k.awaitGPUs(t, 8, 0)
	k.second.awaitGPUs(t, 8, 0)
	time.Sleep(2 * decision)
	if err := errors.Join(k.machine.Load(), k.other.Load()); err != nil {
		t.Fatal(err)
	}
	k.awaitGPUs(t, 8, 8)
	k.second.awaitGPUs(t, 8, 8)
	if now := awaitPlaces(t, k.kubeWork("train"), 8); !sameIDs(now, before) {
		t.Errorf("the pods are %+v, and were %+v", now, before)
	}
	if calls := k.servers.matching(evictions, began); len(calls) > 0 {
		t.Errorf("gpu-fleet asked for %+v", calls)
	}
}

// fleetImage is the image archive of gpu-fleet, which "make image" builds beside that of the agent.
func fleetImage() string {
	return filepath.Join(filepath.Dir(pluginImage()), strings.Replace(filepath.Base(pluginImage()), "k8s-gpu", "gpu-fleet", 1))
}

// privileges deploys gpu-fleet as it is shipped, and lists what its processes, those of the agents and its account may do.
func (k *kubeRescue) privileges(t *testing.T) {
	must(t, "kubectl", "apply", "-k", "../../deploy/gpu-fleet")
	must(t, "kubectl", "rollout", "status", "deployment/gpu-fleet", "--namespace=gpu-fleet", "--timeout=50s")
	for _, program := range []string{"gpu-fleet", "k8s-gpu"} {
		pids := slices.Collect(maps.Keys(running(program)))
		if len(pids) != 2 {
			t.Fatalf("processes of %s: %v", program, pids)
		}
		rows := privilegesOf(t, pids[0])
		for _, row := range rows {
			t.Logf("%s: %s: %s", program, row[0], row[1])
		}
		if program == "gpu-fleet" {
			checkUnprivileged(t, rows)
		}
	}
	const account = "--as=system:serviceaccount:gpu-fleet:gpu-fleet"
	t.Logf("what the account of gpu-fleet may do:\n%s", must(t, "kubectl", "auth", "can-i", "--list", account))
	for _, argv := range [][]string{{"delete", "pods"}, {"patch", "nodes"}, {"update", "nodes", "--subresource=status"}, {"get", "secrets"}, {"create", "pods", "--subresource=exec"}} {
		if text, _ := command(slices.Concat([]string{"kubectl", "auth", "can-i", account, "--namespace=gpu-fleet"}, argv)...); text != "no" { // it fails for no
			t.Errorf("may gpu-fleet %q: %q", argv, text)
		}
	}
}

// checkUnprivileged wants a process without a capability, a folder of the host and a right to gain any.
func checkUnprivileged(t *testing.T, rows [][2]string) {
	t.Helper()
	none := strings.Repeat("0", 16)
	want := map[string]string{
		"user": "65532", "capabilities": none + " " + none, "can gain privileges (`no_new_privs` unset)": "no", "seccomp": "the runtime's profile",
		"root file system": "read-only", "namespaces of the host": "none",
	}
	for _, row := range rows {
		if wanted, ok := want[row[0]]; ok && row[1] != wanted {
			t.Errorf("%s of gpu-fleet: %s, want %s", row[0], row[1], wanted)
		}
	}
}
