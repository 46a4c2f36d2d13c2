//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	policy := write(t, "proofs/policy.yaml", []byte(strings.ReplaceAll(proofPolicy, "DIR", dir)))
	nomad := launchNomad(t, "nomad", onMachine(m, "nomad-history", fmt.Sprintf("policy_file = %q\n    nomad_address = %q%s", policy, nomadAPI, hasty)))
	ran := func() int {
		text, _ := os.ReadFile(filepath.Join(dir, "ran"))
		return strings.Count(string(text), "\n")
	}
	inspect := func() string {
		return must(t, binary("nomad-gpu"), "inspect", "--state-dir="+filepath.Join(stateDir(), "nomad-history"))
	}
	var bad string
	step(t, "no GPU takes work before its proof", func(t *testing.T) {
		nomad.awaitReady(t)
		all := nomad.awaitGPUs(t, 8, 0)
		bad = all[3].ID
		write(t, "proofs/bad", []byte(bad))
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
		must(t, binary("nomad-gpu"), "clear", "--gpu="+bad, "--state-dir="+filepath.Join(stateDir(), "nomad-history"))
		nomad.awaitGPUs(t, 8, 8)
	})
}
