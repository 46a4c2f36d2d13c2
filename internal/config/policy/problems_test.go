package policy_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// Every problem is reported, each with its line, path, value and remedy.
func TestProblems(t *testing.T) {
	all := maps.Clone(problems)
	maps.Copy(all, conflicts)
	if len(all) != len(problems)+len(conflicts) {
		t.Fatal("two cases have one name")
	}
	for name, tc := range all {
		t.Run(name, func(t *testing.T) {
			_, err := read(tc.file, policy.Kubernetes)
			var want []string
			if tc.want != "" {
				want = strings.Split(strings.TrimSpace(tc.want), "\n")
			}
			if diff := cmp.Diff(want, problemLines(err)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

var problems = map[string]struct{ file, want string }{
	"sections that are something else": {"resources: []\nsharing: 3\npolicy: none\n", `
/c.yaml:1: resources = "[...]": want a mapping with gpus or mig
/c.yaml:2: sharing = "3": want a mapping with timeSlicing or mps
/c.yaml:3: policy = "none": want a mapping with include, exclude or rules`},
	"limits without the switch": {`policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2, limit: required}
    - {select: {index: 1}, use: time-slicing, replicas: 2, memory: 20GiB}
    - {select: {index: 2}, use: mps, replicas: 2, limit: required}
    - {select: {index: 3}, use: exclusive, limit: required}
    - {select: {index: 4}, use: reserved, limit: best-effort}
    - {select: {index: 5}, limit: best-effort, name: x}
memoryLimits: {reserve: 1.5MiB, overcommit: true}
`, `
/c.yaml:3: policy.rules[0].limit = "required": limits are experimental and have a switch: want memoryLimits: {experimental: true}, or remove it
/c.yaml:4: policy.rules[1].memory = "20GiB": time-slicing limits no memory by itself: want limit: required or limit: best-effort (experimental), use: mps, or remove it
/c.yaml:5: policy.rules[2].limit = "required": applies to use: time-slicing only: with MPS the key memory is the limit, which CUDA enforces; remove it
/c.yaml:6: policy.rules[3].limit = "required": applies to use: time-slicing only: remove it
/c.yaml:7: policy.rules[4].limit = "best-effort": applies to use: time-slicing only: remove it
/c.yaml:8: policy.rules[5].limit = "best-effort": applies to use: time-slicing only: remove it
/c.yaml:9: memoryLimits.reserve = "1.5MiB": has no effect without the switch for limits, which are experimental: want memoryLimits: {experimental: true}, or remove it
/c.yaml:9: memoryLimits.overcommit = "true": has no effect without the switch for limits, which are experimental: want memoryLimits: {experimental: true}, or remove it`},
	"limits that NVIDIA's hook refuses (fence 22)": {`memoryLimits: {experimental: true, reserve: 1.0001GiB}
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2, limit: required, memory: "0"}
    - {select: {index: 1}, use: time-slicing, replicas: 2, limit: required, memory: 0MiB}
    - {select: {index: 2}, use: time-slicing, replicas: 2, limit: required, memory: abc}
    - {select: {index: 3}, use: time-slicing, replicas: 2, limit: required, memory: 16777216TiB}
    - {select: {index: 4}, use: time-slicing, replicas: 2, limit: required, memory: 1.5MiB}
    - {select: {index: 5}, use: time-slicing, replicas: 2, limit: maybe, memory: 1GiB}
    - {select: {index: 6, migProfile: "1g.*"}, use: time-slicing, replicas: 2, limit: required}
    - {select: {index: 7}, use: time-slicing, replicas: 2, limit: required, threads: 10}
`, `
/c.yaml:1: memoryLimits.reserve = "1.0001GiB": want whole MiB, such as 1024MiB: limits of memory have no other sizes
/c.yaml:4: policy.rules[0].memory = "0": ` + wantSize + `
/c.yaml:5: policy.rules[1].memory = "0MiB": ` + wantSize + `
/c.yaml:6: policy.rules[2].memory = "abc": ` + wantSize + `
/c.yaml:7: policy.rules[3].memory = "16777216TiB": ` + wantSize + `
/c.yaml:8: policy.rules[4].memory = "1.5MiB": want whole MiB, such as 1MiB: limits of memory have no other sizes
/c.yaml:9: policy.rules[5].limit = "maybe": want required or best-effort
/c.yaml:10: policy.rules[6].limit = "required": the driver limits no memory of MIG instances, which have their own, and this rule selects only such: remove it
/c.yaml:11: policy.rules[7].threads = "10": time-slicing has no limit of threads: want use: mps, or remove it`},
	"prove that is something else": {"prove: /usr/bin/check\n", `
/c.yaml:1: prove = "/usr/bin/check": want a mapping`},
	"prove": {`
prove:
  command: /usr/bin/check
  timeout: 60
  at: [boot, start]
  evry: 24h
  idleFor: 10s
  maxPerNode: 0
  windows:
    - {days: [], from: "7:00", to: "24:00"}
    - {days: [saturday], from: "07:00", to: "07:00"}
    - night
  onFail: lost
  unproved: hide
`, `
/c.yaml:3: prove.command = "/usr/bin/check": want a list
/c.yaml:4: prove.timeout = "60": want a time such as 60s, 10m or 168h
/c.yaml:5: prove.at[1] = "start": want boot, reset, recovery or idle
/c.yaml:6: prove.evry = "24h": unknown key: did you mean every?
/c.yaml:7: prove.idleFor = "10s": want a time from 30s to 168h0m0s
/c.yaml:8: prove.maxPerNode = "0": want a number from 1 to 64
/c.yaml:10: prove.windows[0].days = "[...]": want one day at least, or no key: sun, mon, tue, wed, thu, fri or sat
/c.yaml:10: prove.windows[0].from = "7:00": want a time of the day such as 22:00
/c.yaml:10: prove.windows[0].to = "24:00": want a time of the day such as 22:00
/c.yaml:11: prove.windows[1].days[0] = "saturday": want sun, mon, tue, wed, thu, fri or sat
/c.yaml:11: prove.windows[1].to = "07:00": the window ends when it begins: want another time, or no window for any time
/c.yaml:12: prove.windows[2] = "night": want a mapping with days, from or to
/c.yaml:13: prove.onFail = "lost": want unhealthy or degraded
/c.yaml:14: prove.unproved = "hide": want offer or withhold`},
	"prove without an effect": {`
prove:
  command: [check, -q]
  at: [reset]
  every: 24h
  windows: [{from: "01:00", to: "02:00"}]
  unproved: withhold
`, `
/c.yaml:3: prove.command[0] = "check": want the absolute path of a program and its arguments, such as [/usr/local/bin/check-gpu, --quick]
/c.yaml:5: prove.every = "24h": has no effect: prove.at has no idle
/c.yaml:6: prove.windows = "[...]": has no effect: prove.at has no idle
/c.yaml:7: prove.unproved = "withhold": has no effect: prove.at has no boot`},
	"reset that is something else": {"reset: act\n", `
/c.yaml:1: reset = "act": want a mapping with mode, attempts, migLayout, program or pause`},
	"reset": {`
reset:
  mode: on
  attempts: 3
  migLayout: restore
  program: nvidia-smi
  atempts: 1
`, `
/c.yaml:3: reset.mode = "on": want off, report or act
/c.yaml:4: reset.attempts = "3": want 1 or 2
/c.yaml:5: reset.migLayout = "restore": want keep or lost
/c.yaml:6: reset.program = "nvidia-smi": want an absolute path such as /usr/bin/nvidia-smi
/c.yaml:7: reset.atempts = "1": unknown key: did you mean attempts?`},
	"reset without an effect": {"reset: {attempts: 1}\n", `
/c.yaml:1: reset.attempts = "1": has no effect: reset.mode is off`},
	"unknown keys, and keys that are given twice": {`
policy:
  rule: []
  rules:
    - {select: {indx: 0, index: 1, index: 2}, use: reserved, replica: 3}
sharing: {timeslicing: {}, mps: {rename: true, resources: [{nam: gpu}]}}
resources: {gpu: []}
`, `
/c.yaml:3: policy.rule = "[...]": unknown key: did you mean rules?
/c.yaml:5: policy.rules[0].replica = "3": unknown key: did you mean replicas?
/c.yaml:5: policy.rules[0].select.indx = "0": unknown key: did you mean index?
/c.yaml:5: policy.rules[0].select.index = "2": given twice
/c.yaml:6: sharing.timeslicing = "{...}": unknown key: did you mean timeSlicing?
/c.yaml:6: sharing.mps.rename = "true": unknown key: did you mean renameByDefault?
/c.yaml:6: sharing.mps.resources[0].nam = "gpu": unknown key: did you mean name?
/c.yaml:7: resources.gpu = "[...]": unknown key: did you mean gpus?`},
	"selectors": {`
policy:
  include: []
  exclude:
    - {}
    - 0
    -
    - {uuid: []}
    - {uuid: [GPU-*, "", {a: b}, h100]}
    - {pci: [3b:0, 1:2:3:4]}
    - {index: [-1, 010, 1e0, 0x1, 3-1, "0:", 256, 1.0, 0-300]}
    - {model: ""}
    - {migProfile: [[1g]]}
    - {memory: 40GiB}
    - {memory: {}}
    - {memory: {min: 80GiB, max: 40GiB}}
    - {memory: {min: 80GB, max: 0GiB}}
    - {memory: {min: 1e3GiB, max: 99TiB}}
    - {memory: {min: NaNGiB, max: 80}}
`, `
/c.yaml:3: policy.include = "[...]": an empty list offers nothing: leave the key out to offer everything
/c.yaml:5: policy.exclude[0] = "{...}": selects nothing: want uuid, pci, index, model, migProfile or memory
/c.yaml:6: policy.exclude[1] = "0": want a mapping with uuid, pci, index, model, migProfile or memory
/c.yaml:7: policy.exclude[2] = "": want a value, or no item
/c.yaml:8: policy.exclude[3].uuid = "[...]": an empty list selects nothing: leave the key out
/c.yaml:9: policy.exclude[4].uuid[2] = "{...}": want a single value
/c.yaml:9: policy.exclude[4].uuid[0] = "GPU-*": want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...
/c.yaml:9: policy.exclude[4].uuid[1] = "": want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...
/c.yaml:9: policy.exclude[4].uuid[3] = "h100": want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...
/c.yaml:10: policy.exclude[5].pci[0] = "3b:0": want an address as under /sys/bus/pci/devices, such as 0000:3b:00.0
/c.yaml:10: policy.exclude[5].pci[1] = "1:2:3:4": want an address as under /sys/bus/pci/devices, such as 0000:3b:00.0
/c.yaml:11: policy.exclude[6].index[0] = "-1": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[1] = "010": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[2] = "1e0": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[3] = "0x1": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[4] = "3-1": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[5] = "0:": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[6] = "256": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[7] = "1.0": ` + wantIndex + `
/c.yaml:11: policy.exclude[6].index[8] = "0-300": ` + wantIndex + `
/c.yaml:12: policy.exclude[7].model = "": want a product name, with * for any text: "*H100*"
/c.yaml:13: policy.exclude[8].migProfile[0] = "[...]": want a single value
/c.yaml:14: policy.exclude[9].memory = "40GiB": want a mapping with min or max
/c.yaml:15: policy.exclude[10].memory = "{...}": want {min: 40GiB}, {max: 80GiB} or both
/c.yaml:16: policy.exclude[11].memory.min = "80GiB": want no more than max, which is 40GiB
/c.yaml:17: policy.exclude[12].memory.min = "80GB": ` + wantSize + `
/c.yaml:17: policy.exclude[12].memory.max = "0GiB": ` + wantSize + `
/c.yaml:18: policy.exclude[13].memory.min = "1e3GiB": ` + wantSize + `
/c.yaml:18: policy.exclude[13].memory.max = "99TiB": ` + wantSize + `
/c.yaml:19: policy.exclude[14].memory.min = "NaNGiB": ` + wantSize + `
/c.yaml:19: policy.exclude[14].memory.max = "80": ` + wantSize},
	"rules": {`
policy:
  rules:
    - select: {index: 0}
    - use: reserved
    - {select: {index: 1}, use: exclusiv, replicas: 2}
    - {select: {index: 2}, use: exclusive, replicas: 2, threads: 10}
    - {select: {index: 3}, name: x, failRequestsGreaterThanOne: true}
    - {select: {index: 4}, use: time-slicing, memory: 4GiB}
    - {select: {index: 5}, use: mps, replicas: 1, threads: 101, memory: 1KiB, failRequestsGreaterThanOne: false}
    - {select: {index: 6}, use: time-slicing, replicas: 1001, failRequestsGreaterThanOne: yes}
    - {select: {index: 7}, use: reserved, name: x, for: nomad}
    - {select: {index: 8}, for: docker}
    - {select: {index: 9}, migStrategy: some}
    - {select: {migProfile: "1g.*"}, migStrategy: mixed}
    - {select: {index: "0:1"}, use: mps, replicas: 2}
    - {select: {uuid: MIG-1}, use: mps, replicas: 49}
    - {select: {index: 10}, use: [mps], replicas: {}}
`, `
/c.yaml:4: policy.rules[0] = "{...}": does nothing: want use, for, name, migStrategy or injection
/c.yaml:5: policy.rules[1].select = "": want a selector such as {index: 0}, or {model: "*"} for every device
/c.yaml:6: policy.rules[2].use = "exclusiv": want exclusive, time-slicing, mps or reserved
/c.yaml:7: policy.rules[3].replicas = "2": applies to shared devices only: want use: time-slicing or use: mps, or remove it
/c.yaml:7: policy.rules[3].threads = "10": applies to shared devices only: want use: time-slicing or use: mps, or remove it
/c.yaml:8: policy.rules[4].failRequestsGreaterThanOne = "true": applies to shared devices only: want use: time-slicing or use: mps, or remove it
/c.yaml:9: policy.rules[5].replicas = "": ` + wantReplicas + `
/c.yaml:9: policy.rules[5].memory = "4GiB": time-slicing limits no memory by itself: want limit: required or limit: best-effort (experimental), use: mps, or remove it
/c.yaml:10: policy.rules[6].failRequestsGreaterThanOne = "false": want true, or leave it out: two shares by MPS are not more of a GPU than one
/c.yaml:10: policy.rules[6].replicas = "1": ` + wantClients + `
/c.yaml:10: policy.rules[6].memory = "1KiB": ` + wantSize + `
/c.yaml:10: policy.rules[6].threads = "101": want the percent of a GPU's threads for one client, 1 to 100
/c.yaml:11: policy.rules[7].replicas = "1001": ` + wantReplicas + `
/c.yaml:11: policy.rules[7].failRequestsGreaterThanOne = "yes": want true or false
/c.yaml:12: policy.rules[8].name = "x": a reserved device is not offered: remove it
/c.yaml:12: policy.rules[8].for = "nomad": a reserved device is not offered: remove it
/c.yaml:13: policy.rules[9].for = "docker": want nomad or kubernetes
/c.yaml:14: policy.rules[10].migStrategy = "some": want none, single or mixed
/c.yaml:15: policy.rules[11].migStrategy = "mixed": applies to GPUs, and this rule selects MIG instances: select their GPU
/c.yaml:16: policy.rules[12].use = "mps": MPS shares full GPUs only, and this rule selects MIG instances: want time-slicing or exclusive
/c.yaml:17: policy.rules[13].replicas = "49": ` + wantClients + `
/c.yaml:17: policy.rules[13].use = "mps": MPS shares full GPUs only, and this rule selects MIG instances: want time-slicing or exclusive
/c.yaml:18: policy.rules[14].use = "[...]": want a single value`},
	"sharing": {`
sharing:
  timeSlicing:
    renameByDefault: 1
    resources:
      - {}
      - {name: gpu, replicas: 1e3}
      - {name: nvidia.com/gpu, replicas: 2}
      - {name: amd.com/gpu, replicas: "04"}
      - {name: mig-1g.5gb, replicas: 2, devices: 0}
      - {name: mig-2g.5gb, replicas: 2, devices: [0, x, MIG-*]}
      - {name: mig-3g.5gb, replicas: 2, devices: []}
      - {name: mig-4g.5gb, replicas: 2, devices: some}
      - {name: mig-5g.5gb, replicas: 2, devices: 3}
      - {name: mig-6g.5gb, replicas: 2, rename: -x}
      - {name: [gpu], replicas: 2}
      - {name: gppu, replicas: 2}
  mps:
    failRequestsGreaterThanOne: false
    resources: [{name: gpu, replicas: 4}, {name: mig-7g.80gb, replicas: 49}]
`, `
/c.yaml:4: sharing.timeSlicing.renameByDefault = "1": want true or false
/c.yaml:6: sharing.timeSlicing.resources[0].name = "": want the name of a resource, such as nvidia.com/gpu
/c.yaml:6: sharing.timeSlicing.resources[0].replicas = "": ` + wantReplicas + `
/c.yaml:7: sharing.timeSlicing.resources[1].replicas = "1e3": ` + wantReplicas + `
/c.yaml:8: sharing.timeSlicing.resources[2].name = "nvidia.com/gpu": already shared by sharing.timeSlicing.resources[1] at line 7: to share some of its devices differently, use policy.rules
/c.yaml:9: sharing.timeSlicing.resources[3].name = "amd.com/gpu": want a name without a domain, or with nvidia.com/; amd.com/ is another domain
/c.yaml:9: sharing.timeSlicing.resources[3].replicas = "04": ` + wantReplicas + `
/c.yaml:10: sharing.timeSlicing.resources[4].devices = "0": want all, a number, or a list of indices and UUIDs: [0, "0:1", GPU-...]
/c.yaml:11: sharing.timeSlicing.resources[5].devices[1] = "x": ` + wantIndex + `
/c.yaml:11: sharing.timeSlicing.resources[5].devices[2] = "MIG-*": want a UUID as nvidia-smi -L prints it: GPU-... or MIG-...
/c.yaml:12: sharing.timeSlicing.resources[6].devices = "[...]": an empty list selects nothing: leave the key out
/c.yaml:13: sharing.timeSlicing.resources[7].devices = "some": want all, a number, or a list of indices and UUIDs: [0, "0:1", GPU-...]
/c.yaml:14: sharing.timeSlicing.resources[8].devices = "3": want all, or a rename: a request can't distinguish the shares from the devices of mig-5g.5gb that are not shared
/c.yaml:15: sharing.timeSlicing.resources[9].rename = "-x": want letters and digits, with - _ . between them
/c.yaml:16: sharing.timeSlicing.resources[10].name = "[...]": want a single value
/c.yaml:17: sharing.timeSlicing.resources[11].name = "gppu": unknown resource: did you mean nvidia.com/gpu? (gpu, mig-<profile>, or a name from resources or policy.rules)
/c.yaml:19: sharing.mps.failRequestsGreaterThanOne = "false": want true, or leave it out: two shares by MPS are not more of a GPU than one
/c.yaml:20: sharing.mps.resources[0].name = "gpu": already shared by sharing.timeSlicing.resources[1] at line 7: to share some of its devices differently, use policy.rules
/c.yaml:20: sharing.mps.resources[1].name = "mig-7g.80gb": MPS shares full GPUs only: want timeSlicing for MIG instances
/c.yaml:20: sharing.mps.resources[1].replicas = "49": ` + wantClients},
	"names": {`
resources:
  gpus:
    - {pattern: "*H100*", name: nvidia.com/h100/x}
    - {pattern: "*H100*", name: ""}
    - {pattern: "", name: _x}
    - {name: an-hundred-a-hundred-a-hundred-a-hundred-a-hundred-a-h}
    - {pattern: "*"}
    - {pattern: "*A100*", name: a100}
  mig: {a: b}
`, `
/c.yaml:4: resources.gpus[0].name = "nvidia.com/h100/x": want a name without a domain, or with nvidia.com/; h100/ is another domain
/c.yaml:5: resources.gpus[1].pattern = "*H100*": has no effect: resources.gpus[0].pattern at line 4 selects the same, and the first counts
/c.yaml:5: resources.gpus[1].name = "": want letters and digits, with - _ . between them
/c.yaml:6: resources.gpus[2].pattern = "": want a product name, with * for any text: "*H100*"
/c.yaml:6: resources.gpus[2].name = "_x": want letters and digits, with - _ . between them
/c.yaml:7: resources.gpus[3].pattern = "": want a product name, with * for any text: "*H100*"
/c.yaml:7: resources.gpus[3].name = "an-hundred-a-hundred-a-hundred-a-hundred-a-hundred-a-h": want 52 characters or less: nvidia.com/an-hundred-a-hundred-a-hundred-a-hundred-a-hundred-a-h has 65, and 63 are allowed
/c.yaml:8: resources.gpus[4].name = "": want the name of a resource, such as nvidia.com/gpu
/c.yaml:9: resources.gpus[5].pattern = "*A100*": has no effect: resources.gpus[4].pattern at line 8 selects the same, and the first counts
/c.yaml:10: resources.mig = "{...}": want a list`},
	"names that become too long": {`
resources: {mig: [{pattern: "1g.*", name: a-mig-instance-a-mig-instance-a-mig-instance-a}]}
sharing: {timeSlicing: {renameByDefault: true, resources: [{name: mig-instance-a-mig-instance-a-mig-instance-a-m, replicas: 2}]}}
policy: {rules: [{select: {index: 0}, use: time-slicing, replicas: 2}]}
`, `
/c.yaml:2: resources.mig[0].name = "a-mig-instance-a-mig-instance-a-mig-instance-a": a rule that shares without a name makes it nvidia.com/a-mig-instance-a-mig-instance-a-mig-instance-a.shared, which has 64 characters, and 63 are allowed
/c.yaml:3: sharing.timeSlicing.resources[0].name = "mig-instance-a-mig-instance-a-mig-instance-a-m": want 45 characters or less: nvidia.com/mig-instance-a-mig-instance-a-mig-instance-a-m.shared is too long a name for a resource`},
	"injection": {`
policy:
  rules:
    - {select: {index: 0}, injection: nodes}
    - {select: {index: 1}, injection: [cdi, libraries]}
    - {select: {index: 2}, injection: [devices, variables]}
    - {select: {index: 3}, injection: []}
    - {select: {index: 4}, injection: [device, [cdi], variables, librarys]}
    - {select: {index: 5}, injection: {cdi: true}}
    - {select: {index: 6}, for: kubernetes, injection: cdi}
    - {select: {index: 7}, use: reserved, injection: cdi}
    - {select: {index: 8}, for: nomad, injection: 'variables,libraries'}
`, `
/c.yaml:4: policy.rules[0].injection = "nodes": want variables, devices, cdi or libraries
/c.yaml:5: policy.rules[1].injection = "[...]": libraries belongs to devices, because NVIDIA's container runtime and CDI have the driver's files: want devices beside it
/c.yaml:6: policy.rules[2].injection = "[...]": variables has the device nodes, too, and selects NVIDIA's container runtime: want one of variables and devices
/c.yaml:7: policy.rules[3].injection = "[...]": an empty list gives a task nothing: leave the key out
/c.yaml:8: policy.rules[4].injection[0] = "device": want variables, devices, cdi or libraries
/c.yaml:8: policy.rules[4].injection[1] = "[...]": want a single value
/c.yaml:8: policy.rules[4].injection[3] = "librarys": want variables, devices, cdi or libraries
/c.yaml:9: policy.rules[5].injection = "{...}": want a list
/c.yaml:10: policy.rules[6].injection = "cdi": applies to tasks under Nomad: remove it, or for: kubernetes
/c.yaml:11: policy.rules[7].injection = "cdi": a reserved device is not offered: remove it
/c.yaml:12: policy.rules[8].injection = "variables,libraries": want variables, devices, cdi or libraries`},
	"rules without effect": {`
policy:
  exclude: [{uuid: GPU-1}]
  rules:
    - {select: {index: "0-3"}, use: exclusive}
    - {select: {index: ["5:1", "3:1"], memory: {min: 1GiB}}, use: reserved}
    - {select: {uuid: GPU-1}, use: reserved}
    - {select: {pci: "3b:00.0", model: x}, use: reserved}
    - {select: {pci: "0000:3b:00.0"}, use: exclusive}
    - {select: {model: "*"}, for: nomad}
    - {select: {uuid: GPU-2}, use: reserved}
`, `
/c.yaml:6: policy.rules[1] = "{...}": selects 3:1, as does c.yaml:5: policy.rules[0].select, and the first rule that selects a device counts
/c.yaml:7: policy.rules[2] = "{...}": selects GPU-1, as does c.yaml:3: policy.exclude[0], and the first rule that selects a device counts
/c.yaml:11: policy.rules[6] = "{...}": has no effect: c.yaml:10: policy.rules[5].select selects every device`},
}

const (
	wantIndex    = `want the number of a GPU, a range or GPU:instance, up to 255: 0, "2-4" or "0:1"`
	wantSize     = `want a size such as 512MiB or 40GiB (KiB, MiB, GiB, TiB), from 1MiB to 16TiB`
	wantReplicas = `want 2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)`
	wantClients  = `want 2 or more, up to 48 (so many clients fit an MPS server)`
)
