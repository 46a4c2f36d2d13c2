//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	ownersGPUs = 8               // works at a time, each with one GPU
	ownersIn   = 5 * time.Second // in which the owner of a GPU is shown and not shown any more
)

// ownersRounds is the variable for how often ownersGPUs works begin and end: 125 rounds are 1,000 works.
const ownersRounds = "E2E_OWNER_ROUNDS"

// ownersTest is one orchestrator with one agent whose devices get and lose owners. The agent withholds occupied devices, so that a wrong
// finding shows.
type ownersTest struct {
	m      *simdriver.Machine
	socket string // of the agent
	jobs   string // folder of the job files

	begin func(t *testing.T, round int) // starts ownersGPUs works, each of which sleeps for marker(round) seconds
	end   func(t *testing.T, round int) // ends them
	owner func(w work) report.Owner     // that a work is to have, "" = any
	gone  func() error                  // nil = the orchestrator has recorded the end of all works
}

// TestOwnersOfJobs has Nomad start and end jobs, by exec and raw_exec, and nomad-gpu show them with their names.
func TestOwnersOfJobs(t *testing.T) {
	m := install(t, "h100x8")
	jobs := filepath.Join(stateDir(), "jobs")
	nomad := launchNomad(t, "nomad", onMachine(m, "nomad-history", fmt.Sprintf("occupancy = \"withhold\"\n    hpc_job_mapping_dir = %q", jobs)))
	nomad.awaitReady(t)
	nomad.awaitGPUs(t, 8, 8)
	name := func(round int) string { return fmt.Sprintf("train-%d", round) }
	o := &ownersTest{
		m: m, socket: control.Path(filepath.Join(stateDir(), "nomad-history"), "nomad-gpu"), jobs: jobs,
		begin: func(t *testing.T, round int) {
			nomad.submit(t, "owners.nomad.hcl", "name="+name(round), "seconds="+marker(round), "driver="+[]string{"exec", "raw_exec"}[round%2])
		},
		end:  func(t *testing.T, round int) { nomad.remove(t, name(round)) },
		gone: func() error { return nil }, // the owner is to be gone after the process has ended
		owner: func(w work) report.Owner {
			return report.Owner{Orchestrator: "nomad", Namespace: "default", Name: w.env["NOMAD_JOB_ID"], Container: "sleep", ID: w.env["NOMAD_ALLOC_ID"]}
		},
	}
	o.run(t)
	step(t, "nomad-gpu is killed", func(t *testing.T) {
		round := 1_000
		works := o.start(t, round)
		nomad.killPlugin(t)
		began := time.Now()
		for _, w := range works {
			w.seen = began
			o.awaitOwner(t, w, 60*time.Second)
		}
		t.Logf("owners are shown %v after another nomad-gpu has started", time.Since(began).Round(time.Millisecond))
		o.stop(t, round, works)
	})
}

// TestOwnersOfPods has kubelet start and end pods, and k8s-gpu show them with their names.
func TestOwnersOfPods(t *testing.T) {
	m := install(t, "h100x8")
	c := startClusterOn(t, containerd2WithPodGroups, pluginImage())
	component, err := os.ReadFile("../../deploy/owners/kustomization.yaml")
	if err != nil {
		t.Fatal(err)
	}
	jobs := filepath.Join(stateDir(), "jobs")
	text := strings.NewReplacer("value: report", "value: withhold", "path: /var/log/pods", "path: "+logDir()+"/pods").Replace(string(component))
	write(t, "parts/owners/kustomization.yaml", []byte(text))
	render(t, "parts/jobs/kustomization.yaml", map[string]string{"JOBS": jobs})
	c.deployPlugin(t, m.Root, "k8s-history", "parts/owners", "parts/jobs")
	c.awaitGPUs(t, 8, 8)
	name := func(round, i int) string { return fmt.Sprintf("train-%d-%d", round, i) }
	o := &ownersTest{
		m: m, socket: control.Path(filepath.Join(stateDir(), "k8s-history"), "k8s-gpu"), jobs: jobs,
		begin: func(t *testing.T, round int) {
			var pods []string
			for i := range ownersGPUs {
				path := render(t, "pod.yaml", map[string]string{"NAME": name(round, i), "RESOURCE": gpuResource, "COUNT": "1"})
				text, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				pods = append(pods, strings.ReplaceAll(string(text), "sleep 1000000", "sleep "+marker(round)))
			}
			must(t, "kubectl", "apply", "-f", write(t, "pods.yaml", []byte(strings.Join(pods, "\n---\n"))))
		},
		end: func(t *testing.T, round int) {
			var pods []string
			for i := range ownersGPUs {
				pods = append(pods, name(round, i))
			}
			must(t, append([]string{"kubectl", "delete", "pod", "--wait=false", "--now"}, pods...)...)
		},
		gone: func() error {
			held, err := c.held()
			if err == nil && len(held) > 0 {
				err = fmt.Errorf("kubelet lists %v", held)
			}
			return err
		},
		owner: func(w work) report.Owner {
			return report.Owner{Orchestrator: "kubernetes", Namespace: "default", Name: w.env["HOSTNAME"], Container: "gpus"}
		},
	}
	o.run(t)
	c.proofs(t, m)
}
