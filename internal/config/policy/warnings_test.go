package policy_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

const (
	renamed = ".rename: NVIDIA's k8s-device-plugin ignores this field and offers the shares as nvidia.com/gpu; here they are nvidia.com/shared-h100"
	some    = ".devices: NVIDIA's k8s-device-plugin ignores this field and shares every device of nvidia.com/gpu; here only the devices that it selects are shared, the others stay nvidia.com/gpu"
	names   = "resources.gpus: NVIDIA's k8s-device-plugin ignores this field and offers every full GPU as nvidia.com/gpu; here GPUs have the names that it gives"
	mig     = "resources.mig: NVIDIA's k8s-device-plugin ignores this field and names MIG instances by its MIG strategy and their profile; here MIG instances have the names that it gives"
)

// A file that moves over from NVIDIA's plugin and gives other resources here does not do so without a word: each field
// that is ignored there and counts here is named with its line, once, by either agent.
func TestFieldsThatNVIDIAsPluginIgnores(t *testing.T) {
	for name, tc := range map[string]struct {
		file string
		want []string
	}{
		"nothing":  {"version: v1\n", nil},
		"defaults": {"sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, devices: all}]}}\n", nil},
		"what it does by default": {
			"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: gpu.shared, replicas: 2}]}}\n", nil},
		"blank": {"resources:\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, rename: , devices: }]}}\n", nil},
		"the names that it gives": {
			"resources: {gpus: [{pattern: \"*\", name: nvidia.com/gpu}], mig: [{pattern: 1g.10gb+me, name: mig-1g.10gb.me}]}\n", nil},
		"its example with a rename and some devices": {`version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      rename: nvidia.com/shared-h100
      devices: [0, 1, 2]
      replicas: 2
`, []string{":6: sharing.timeSlicing.resources[0]" + renamed, ":7: sharing.timeSlicing.resources[0]" + some}},
		"a number of devices": {"sharing: {timeSlicing: {resources: [{name: gpu, rename: shared-h100, replicas: 2, devices: 3}]}}\n", []string{
			":1: sharing.timeSlicing.resources[0]" + renamed, ":1: sharing.timeSlicing.resources[0]" + some}},
		"another name than by default": {
			"sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, rename: shared-h100, replicas: 2}]}}\n", []string{
				":1: sharing.timeSlicing.resources[0]" + strings.Replace(renamed, "nvidia.com/gpu", "nvidia.com/gpu.shared", 1)}},
		"by MPS": {"flags: {mpsRoot: /mps}\nsharing: {mps: {resources: [{name: gpu, rename: shared-h100, replicas: 2}]}}\n", []string{
			":2: sharing.mps.resources[0]" + renamed}},
		"names": {"resources:\n  gpus: [{pattern: \"*H100*\", name: h100}, {pattern: \"*A100*\", name: a100}]\n  mig:\n  - {pattern: 1g.*, name: small}\n", []string{
			":2: " + names, ":3: " + mig}},
		"both ways of sharing": {
			"flags: {mpsRoot: /mps}\nresources: {mig: [{pattern: 1g.*, name: small}]}\nsharing:\n  timeSlicing: {resources: [{name: small, replicas: 2}]}\n  mps: {resources: [{name: gpu, replicas: 2}]}\n", []string{
				":2: " + mig, ":4: sharing.timeSlicing: NVIDIA's k8s-device-plugin ignores this field and shares nothing by time-slicing while there is sharing.mps; here each resource is shared as the file has it"}},
	} {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			r, err := read(t, tc.file, to)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			var got []string
			for _, w := range r.Warnings {
				_, where, _ := strings.Cut(w, "/c.yaml")
				got = append(got, where)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s, to %s:\n%s", name, to, diff)
			}
		}
	}
}
