//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// scene is one machine under both orchestrators, each of them watched.
type scene struct {
	nomad *agent
	kube  *cluster
	began time.Time
	job   *holder // once work has begun
	pod   pod     // likewise

	nomadNode, kubeNode, kubelet *view

	plugin int         // the process of nomad-gpu
	agents map[int]int // the processes of k8s-gpu, and their parents
}

// startScene starts both orchestrators and both agents, each with its own state directory.
func startScene(t *testing.T, m *simdriver.Machine) *scene {
	t.Helper()
	return startAgents(t, m, onMachine(m, "nomad-history", ""), "k8s-history")
}

// startSceneUnder starts them with a policy, and one state directory for both. Each offers what the other does, too.
func startSceneUnder(t *testing.T, m *simdriver.Machine, policy string) *scene {
	t.Helper()
	writePolicy(t, policy)
	render(t, "parts/policy/kustomization.yaml", map[string]string{
		"POLICY": policyDir(), "MPS": mpsRoot(), "PROGRAMS": mpsPrograms(), "HISTORY": filepath.Join(stateDir(), sharedHistory),
	})
	config := onMachine(m, sharedHistory, `policy_file = "`+policyDir()+`/policy.yaml"`+"\noverlap = \"warn\"\nnomad_address = \""+nomadAPI+"\"") // a GPU that the policy takes from Nomad is free when its work has ended
	s := startAgents(t, m, config, sharedHistory, shippedPart(t, "mps"), "parts/policy")
	s.kube.age(t)
	return s
}

func startAgents(t *testing.T, m *simdriver.Machine, nomadConfig, history string, parts ...string) *scene {
	t.Helper()
	s := &scene{nomad: launchNomad(t, "nomad", nomadConfig), kube: startCluster(t, pluginImage())}
	s.kube.deployPlugin(t, m.Root, history, parts...)
	s.nomad.awaitReady(t)
	s.nomadNode, s.kubeNode, s.kubelet = followNomad(t, s.nomad), followNode(t, s.kube), followKubelet(t, s.kube)
	s.began = time.Now()
	return s
}

// do does it all and gives when that began.
func (s *scene) do(t *testing.T, all ...func() error) time.Time {
	t.Helper()
	began := time.Now()
	for _, do := range all {
		if err := do(); err != nil {
			t.Fatal(err)
		}
	}
	return began
}

// expect waits until all three views match the patterns.
func (s *scene) expect(t *testing.T, since time.Time, nomadNode, kubeNode, kubelet string) {
	t.Helper()
	s.kubelet.await(t, since, kubelet)
	s.nomadNode.await(t, since, nomadNode)
	s.kubeNode.await(t, since, kubeNode)
}

// learn notes which processes the agents are.
func (s *scene) learn(t *testing.T) {
	t.Helper()
	s.plugin, s.agents = s.nomad.plugin(), running("k8s-gpu")
	if s.plugin == 0 || len(s.agents) != 1 {
		t.Fatalf("nomad-gpu is process %d, k8s-gpu is %v (process: parent)", s.plugin, s.agents)
	}
}

// processes returns the processes of both agents, in order.
func (s *scene) processes() []int {
	pids := append(slices.Collect(maps.Keys(s.agents)), s.plugin)
	slices.Sort(pids)
	return pids
}

func (s *scene) sameProcesses(t *testing.T) {
	t.Helper()
	if plugin, agents := s.nomad.plugin(), running("k8s-gpu"); plugin != s.plugin || !maps.Equal(agents, s.agents) {
		t.Errorf("nomad-gpu was process %d, it is %d; k8s-gpu was %v, it is %v", s.plugin, plugin, s.agents, agents)
	}
}

// otherProcesses is nil when both agents have been started anew.
func (s *scene) otherProcesses() error {
	plugin, agents := s.nomad.plugin(), running("k8s-gpu")
	if plugin == 0 || plugin == s.plugin {
		return fmt.Errorf("nomad-gpu was process %d, it is %d", s.plugin, plugin)
	}
	for pid := range agents {
		if _, old := s.agents[pid]; !old {
			return nil
		}
	}
	return fmt.Errorf("k8s-gpu was %v, it is %v (process: parent)", s.agents, agents)
}

// nothingChanged fails unless the agents are the same processes, and job and pod run as they did.
func (s *scene) nothingChanged(t *testing.T) {
	t.Helper()
	s.sameProcesses(t)
	s.job.check(t)
	s.kube.awaitUnchanged(t, "held", s.pod)
	tasks, err := s.kube.tasks()
	for _, id := range s.pod.containers() {
		if tasks[id] == "" {
			err = errors.Join(err, fmt.Errorf("the container of pod held is gone: %q", slices.Collect(maps.Keys(tasks))))
		}
	}
	if err != nil {
		t.Error(err)
	}
}

// opened returns how often each agent has found the driver.
func (s *scene) opened(t *testing.T) (plugin, agent int) {
	t.Helper()
	const found = "driver ready"
	return strings.Count(readLog(t, s.nomad.name), found), strings.Count(s.kube.pluginLog(t), found)
}

// awaitChecks waits until both agents have asked the driver again.
func (s *scene) awaitChecks(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	address := "http://" + s.kube.plugin(t).Status.PodIP + ":9410/metrics"
	checks := func() (string, uint64, error) {
		calls, err := m.CallsOf(s.plugin)
		metrics, err2 := fetch(address)
		_, after, _ := strings.Cut(metrics, "\ntandem_last_health_check_timestamp_seconds ")
		line, _, _ := strings.Cut(after, "\n")
		return line, calls["nvmlDeviceGetUUID"], errors.Join(err, err2)
	}
	agent, plugin, err := checks()
	if err != nil {
		t.Fatal(err)
	}
	await(t, "both agents to check the GPUs", 60*time.Second, func() error {
		a, p, err := checks()
		if err == nil && (a == agent || p == plugin) {
			err = fmt.Errorf("k8s-gpu has %q as before, or nomad-gpu has called %v times as before", a, p)
		}
		return err
	})
}

// checkDriver fails if an agent misused the driver.
func checkDriver(t *testing.T, m *simdriver.Machine) {
	t.Helper()
	if misuse, err := m.Violations(); err != nil || len(misuse) > 0 {
		t.Errorf("the driver was misused: %q, error %v", misuse, err)
	}
}
