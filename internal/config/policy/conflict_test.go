package policy_test

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// A pool whose units are shared in different ways is found where the file is read, if it is so on any machine.
func TestClashes(t *testing.T) {
	for name, tc := range map[string]struct{ file, want string }{
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
	} {
		t.Run(name, func(t *testing.T) {
			got := ""
			if _, err := read(t, tc.file, policy.Kubernetes); err != nil {
				got = err.Error()
			}
			if got != tc.want {
				t.Errorf("%s\nwant\n%s", got, tc.want)
			}
		})
	}
}
