package policy_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// conflicts are pools whose units are shared in different ways: a problem of the file if it is so on any node, else none.
var conflicts = map[string]struct{ file, want string }{
	"two rules": {`
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2}
    - {select: {index: 1}, use: time-slicing, replicas: 4}
`, `/c.yaml:5: policy.rules[1].select = "nvidia.com/gpu.shared": would be time-slicing by 4, but by c.yaml:4: policy.rules[0].select it is time-slicing by 2: want another name for one of them`},
	"two rules with names": {`
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2}
    - {select: {index: 1}, use: time-slicing, replicas: 4, name: quarter}
`, ""},
	"two rules of one kind": {`
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2}
    - {select: {index: 1}, use: time-slicing, replicas: 2}
    - {select: {index: 2}, use: mps, replicas: 2}
`, ""},
	"rules of one profile": {`
policy:
  rules:
    - {select: {migProfile: 1g.10gb, index: 0}, use: time-slicing, replicas: 2}
    - {select: {migProfile: 1g.10gb, index: 1}, use: time-slicing, replicas: 4}
`, `/c.yaml:5: policy.rules[1].select = "nvidia.com/mig-1g.10gb.shared": would be time-slicing by 4, but by c.yaml:4: policy.rules[0].select it is time-slicing by 2: want another name for one of them`},
	"rules of models with names": {`
resources: {gpus: [{pattern: "*H100*", name: h100}, {pattern: "*A100*", name: a100}]}
policy:
  rules:
    - {select: {model: "*H100*"}, use: time-slicing, replicas: 2}
    - {select: {model: "*A100*"}, use: time-slicing, replicas: 4}
`, ""},
	"a GPU and an instance": {`
policy:
  rules:
    - {select: {index: "0:1"}, use: time-slicing, replicas: 2}
    - {select: {index: 1}, use: time-slicing, replicas: 4}
`, ""},
	"limits differ": {`
policy:
  rules:
    - {select: {index: 0}, use: mps, replicas: 2, name: x, memory: 4GiB}
    - {select: {index: 1}, use: mps, replicas: 2, name: x, memory: 8GiB}
`, `/c.yaml:5: policy.rules[1].select = "nvidia.com/x": would be mps by 2, 8192 MiB each, but by c.yaml:4: policy.rules[0].select it is mps by 2, 4096 MiB each: want another name for one of them`},
	"a share called like the GPUs": {`
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2, name: gpu}
`, `/c.yaml: devices that no rule selects = "nvidia.com/gpu": would be exclusive, but by c.yaml:4: policy.rules[0].select it is time-slicing by 2: want another name for one of them`},
	"all shares are called like the GPUs": {`
policy:
  rules:
    - {select: {index: 0}, use: reserved}
    - {select: {model: "*"}, use: time-slicing, replicas: 2, name: gpu}
`, ""},
	"the other's rules do not count": {`
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2, name: gpu, for: nomad}
    - {select: {index: 1}, use: time-slicing, replicas: 4, for: nomad}
`, ""},
	"a rename to GPUs": {`
sharing: {timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 2, rename: nvidia.com/gpu}]}}
`, `/c.yaml:2: sharing.timeSlicing.resources[0] = "nvidia.com/gpu": would be time-slicing by 2, but by c.yaml: devices that no rule selects it is exclusive: want another name for one of them`},
	"two renames": {`
sharing:
  timeSlicing: {resources: [{name: mig-1g.5gb, replicas: 2, rename: x}, {name: mig-2g.10gb, replicas: 4, rename: x}]}
`, `/c.yaml:3: sharing.timeSlicing.resources[1] = "nvidia.com/x": would be time-slicing by 4, but by c.yaml:3: sharing.timeSlicing.resources[0] it is time-slicing by 2: want another name for one of them`},
	"a rule and a share": {`
sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 2}]}}
policy: {rules: [{select: {index: 0}, use: time-slicing, replicas: 4}]}
`, `/c.yaml:2: sharing.timeSlicing.resources[0] = "nvidia.com/gpu.shared": would be time-slicing by 2, but by c.yaml:3: policy.rules[0].select it is time-slicing by 4: want another name for one of them`},
	"an exclusive rule and a share": {`
sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}
policy: {rules: [{select: {index: 0}, use: exclusive}]}
`, `/c.yaml:2: sharing.timeSlicing.resources[0] = "nvidia.com/gpu": would be time-slicing by 2, but by c.yaml:3: policy.rules[0].select it is exclusive: want another name for one of them`},
	"a name and a rule's name": {`
resources: {gpus: [{pattern: "*H100*", name: x}]}
policy: {rules: [{select: {index: 0}, use: time-slicing, replicas: 2, name: x}]}
`, `/c.yaml:2: resources.gpus[0] = "nvidia.com/x": would be exclusive, but by c.yaml:3: policy.rules[0].select it is time-slicing by 2: want another name for one of them`},
	"a rule's name that is shared": {`
sharing: {timeSlicing: {resources: [{name: x, replicas: 2}]}}
policy: {rules: [{select: {index: 0}, name: x}, {select: {index: 1}, name: x}]}
`, ""},
	"NVIDIA's default names": {`
resources: {gpus: [{pattern: "*", name: gpu}], mig: [{pattern: 1g.5gb, name: mig-1g.5gb}, {pattern: 1g.5gb+me, name: nvidia.com/mig-1g.5gb.me}]}
sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}, {name: mig-1g.5gb, replicas: 3}]}}
`, ""},
}

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
			r, err := read(tc.file, to)
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
