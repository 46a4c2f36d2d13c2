//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/cudastub"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// proofPolicy has every GPU proved after a boot, before it takes work. The command writes down each GPU, and fails those that a file lists.
const proofPolicy = `version: v1
prove:
  command:
    - /bin/sh
    - -c
    - |
      echo "$CUDA_VISIBLE_DEVICES $TANDEM_PROOF_REASON" >>DIR/ran
      sleep 2
      if grep -qs "$CUDA_VISIBLE_DEVICES" DIR/bad; then
        echo '{"summary": "7 wrong words", "values": {"tested_bytes": 4096}}'
        exit 1
      fi
  timeout: 5s
  at: [boot, recovery]
  maxPerNode: 8
  unproved: withhold
`

// TestNomadProofs has nomad-gpu prove the GPUs of a node that has just booted: they take work when they have passed. One fails.
func TestNomadProofs(t *testing.T) {
	m := install(t, "h100x8")
	dir := filepath.Join(stateDir(), "proofs")
	bad := m.UUID(3)
	write(t, "proofs/bad", []byte(bad)) // before the first proof can begin
	policy := write(t, "proofs/policy.yaml", []byte(strings.ReplaceAll(proofPolicy, "DIR", dir)))
	nomad := launchNomad(t, "nomad", onMachine(m, "nomad-history", fmt.Sprintf("policy_file = %q\n    nomad_address = %q%s", policy, nomadAPI, hasty)))
	ran := func() int {
		text, _ := os.ReadFile(filepath.Join(dir, "ran"))
		return strings.Count(string(text), "\n")
	}
	inspect := func() string {
		return must(t, binary("nomad-gpu"), "inspect", "--state-dir="+filepath.Join(stateDir(), "nomad-history"))
	}
	step(t, "no GPU takes work before its proof", func(t *testing.T) {
		nomad.awaitReady(t)
		all := nomad.awaitGPUs(t, 8, 0)
		if text := all[0].HealthDescription; !strings.HasPrefix(text, "PROVING unknown: ") || !strings.Contains(text, "since the boot") {
			t.Errorf("Nomad's description: %s", text)
		}
		nomad.submit(t, "gpus.nomad.hcl", "name=train", "count=7")
	})
	step(t, "seven pass and one fails", func(t *testing.T) {
		began := time.Now()
		await(t, "the end of all proofs", 3*time.Minute, func() error {
			n, err := nomad.node()
			if err == nil && n.healthy() != 7 {
				err = fmt.Errorf("%d healthy devices, %d proofs", n.healthy(), ran())
			}
			return err
		})
		t.Logf("%v after the node was ready", time.Since(began).Round(time.Second))
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "PROOF_FAILED unhealthy: proof failed (7 wrong words)")
		if got, _ := nomad.awaitWork(t, "train", "complete"); len(got) != 7 || strings.Contains(strings.Join(got, " "), bad) {
			t.Errorf("the job has %s, and %s failed its proof", got, bad)
		}
		t.Logf("inspect:\n%s", inspect())
	})
	step(t, "what was proved stays known when nomad-gpu is killed", func(t *testing.T) {
		nomad.killPlugin(t)
		checkReason(t, nomad.awaitGPUs(t, 8, 7), bad, "PROOF_FAILED")
		if n := ran(); n != 8 {
			t.Errorf("%d proofs of 8 GPUs", n)
		}
	})
	step(t, "a person clears the failure", func(t *testing.T) {
		write(t, "proofs/bad", nil)
		await(t, "the new plugin to know the GPU", 30*time.Second, func() error {
			return try(binary("nomad-gpu"), "clear", "--gpu="+bad, "--state-dir="+filepath.Join(stateDir(), "nomad-history"))
		})
		nomad.awaitGPUs(t, 8, 8)
	})
}

// kubeProofs is the configuration of deploy/prove for three GPUs that have just booted, with a proof of ten seconds.
const kubeProofs = `version: v1
policy: {include: [{index: "0-2"}]}
prove:
  command: [/usr/bin/k8s-gpu, prove-gpu, --json, --timeout=15s]
  timeout: 20s
  at: [boot]
  maxPerNode: 3
  unproved: withhold
`

// proofs has k8s-gpu prove GPUs by the component prove, as it is shipped but for its configuration: with the image's own prove-gpu and a CUDA driver that
// computes on the CPU. One GPU fails.
func (c *cluster) proofs(t *testing.T, m *simdriver.Machine) {
	bad := m.UUID(1)
	cudastub.Build(t, filepath.Join(m.Root, "usr/lib/x86_64-linux-gnu"), fmt.Sprintf("-DSTUB_CUDA_BAD=%q", bad))
	deploy := func(t *testing.T, history string, parts ...string) {
		t.Helper()
		prove := shippedPart(t, "prove")
		write(t, prove+"/policy.yaml", []byte(kubeProofs))
		c.deployPlugin(t, m.Root, history, append(parts, prove)...)
	}
	began := time.Now()
	step(t, "no GPU takes work before its proof", func(t *testing.T) {
		c.age(t) // the holders of GPUs are known
		deploy(t, "k8s-proofs")
		began = time.Now()
		c.awaitGPUs(t, 3, 0)
		c.request(t, "proved", gpuResource, 2)
		c.awaitInsufficient(t, "proved", gpuResource)
	})
	step(t, "two pass and one fails, and a pod gets the others", func(t *testing.T) {
		await(t, "two allocatable GPUs", 2*time.Minute, func() error {
			all, free, err := c.offer()
			if err == nil && all+" "+free != "3 2" {
				err = fmt.Errorf("the node shows %s of %s", free, all)
			}
			return err
		})
		t.Logf("%v after the agent was ready", time.Since(began).Round(time.Second))
		if p, output := c.awaitWork(t, "proved", 2); strings.Contains(output, bad) {
			t.Errorf("pod %s has %s, which failed its proof: %s", p.Metadata.Name, bad, output)
		}
		r, err := control.Report(t.Context(), control.Path(filepath.Join(stateDir(), "k8s-proofs"), "k8s-gpu"))
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(r.Devices, func(d report.Device) bool { return string(d.ID) == bad })
		if i < 0 || r.Devices[i].Schedulable || r.Devices[i].Cause != "PROOF_FAILED" || !strings.Contains(r.Devices[i].Health, "matrix product 1") {
			t.Errorf("%s: %+v", bad, r.Devices)
		}
		t.Logf("inspect:\n%s", must(t, "kubectl", "exec", "--namespace=kube-system", c.plugin(t).Metadata.Name, "--", "k8s-gpu", "inspect"))
		c.remove(t, "proved")
	})
	step(t, "with DRA they have a taint until they are proved", func(t *testing.T) {
		installHook(t, m)
		render(t, "parts/cdi/kustomization.yaml", map[string]string{"HOOK": hook(m)})
		deploy(t, "k8s-proofs-dra", shippedPart(t, "dra"), "parts/cdi")
		c.awaitDevices(t, 3, 3)
		devices, err := c.published()
		for name, d := range devices {
			if text := fmt.Sprintf("%+v", d.Taints); err != nil || len(d.Taints) != 1 || !strings.Contains(text, "NoSchedule") || !strings.Contains(strings.ToUpper(text), "PROVING") {
				t.Errorf("%s has the taints %s, error %v", name, text, err)
			}
		}
	})
}
