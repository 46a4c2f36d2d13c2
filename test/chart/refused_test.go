package chart

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// Each wrong value is refused with its place and what was written there, or of which type it is.
func TestWrongValuesAreRefused(t *testing.T) {
	for _, c := range []struct {
		values string
		want   []string // in one line of the message
	}{
		// misspelled names
		{`migStratgy: mixed`, []string{"additional properties 'migStratgy' not allowed"}},
		{`image: {repo: x}`, []string{"/image'", "'repo'"}},
		{`config: {maps: {}}`, []string{"/config'", "'maps'"}},
		{`mps: {roots: /x}`, []string{"/mps'", "'roots'"}},
		{`cdi: {privilege: true}`, []string{"/cdi'", "'privilege'"}},
		{`owners: {occupancies: report}`, []string{"/owners'", "'occupancies'"}},
		{`podMonitor: {enable: true}`, []string{"/podMonitor'", "'enable'"}},
		{`networkPolicy: {form: []}`, []string{"/networkPolicy'", "'form'"}},
		{`resources: {limit: {memory: 1Gi}}`, []string{"/resources'", "'limit'"}},
		{`tolerations: [{keys: x}]`, []string{"/tolerations/0'", "'keys'"}},
		{`affinity: {nodeAfinity: {}}`, []string{"/affinity'", "'nodeAfinity'"}},
		{`pools: [{name: a, nodeSelector: {a: b}, nodeselectors: {}}]`, []string{"/pools/0'", "'nodeselectors'"}},
		{`pools: [{name: a, nodeSelector: {a: b}, httpPort: 1}]`, []string{"/pools/0'", "'httpPort'"}},
		{`pools: [{name: a, nodeSelector: {a: b}, mig: {enable: true}}]`, []string{"/pools/0/mig'", "'enable'"}},
		{`updateStrategy: {rollingUpdate: {maxUnavaliable: 2}}`, []string{"/updateStrategy/rollingUpdate'", "'maxUnavaliable'"}},
		{`extraEnv: [{name: A, valeu: b}]`, []string{"/extraEnv/0'", "'valeu'"}},
		{`config: {map: {default: {flags: {migStratgy: none}}}}`, []string{"/config/map/default/flags'", "'migStratgy'"}},
		{`config: {map: {default: {policy: {rules: [{select: {index: 0}, use: reserved, names: x}]}}}}`, []string{"rules/0'", "'names'"}},
		// wrong types
		{`failOnInitError: "true"`, []string{"/failOnInitError'", "got string", "boolean"}},
		{`mig: {enabled: 1}`, []string{"/mig/enabled'", "got number", "boolean"}},
		{`migStrategy: true`, []string{"/migStrategy'", "got boolean", "string"}},
		{`httpPort: "9410"`, []string{"/httpPort'", "got string", "integer"}},
		{`image: ghcr.io/x:1`, []string{"/image'", "got string", "object"}},
		{`imagePullSecrets: registry`, []string{"/imagePullSecrets'", "got string", "array"}},
		{`pools: {a: {}}`, []string{"/pools'", "got object", "array"}},
		{`nodeSelector: {gpu: true}`, []string{"/nodeSelector/gpu'", "got boolean", "string"}},
		{`podAnnotations: {a: 1}`, []string{"/podAnnotations/a'", "got number", "string"}},
		{`extraEnv: {A: b}`, []string{"/extraEnv'", "got object", "array"}},
		{`extraEnv: [{name: A, value: 1}]`, []string{"/extraEnv/0/value'", "got number", "string"}},
		{`config: null`, []string{"missing property 'config'"}},
		{`mps: {root: null}`, []string{"/mps'", "missing property 'root'"}},
		{`owners: {enabled: null}`, []string{"/owners'", "missing property 'enabled'"}},
		// wrong values
		{`api: DRA`, []string{"/api'", "'DRA'", "device-plugin|dra"}},
		{`{api: dra, onUnhealthy: delete}`, []string{"/onUnhealthy'", "'delete'", "taint|evict"}},
		{`deviceClasses: {extendedResourceName: gpu}`, []string{"/deviceClasses/extendedResourceName'", "'gpu'"}},
		{`networkPolicy: {apiServerPorts: []}`, []string{"/networkPolicy/apiServerPorts'"}},
		{`migStrategy: mixd`, []string{"/migStrategy'", "'mixd'", "none|single|mixed"}},
		{`deviceListStrategy: envvar,cdi`, []string{"/deviceListStrategy'", "'envvar,cdi'", "cdi-cri"}},
		{`deviceIDStrategy: serial`, []string{"/deviceIDStrategy'", "'serial'", "uuid|index"}},
		{`deviceDiscoveryStrategy: tegra`, []string{"/deviceDiscoveryStrategy'", "'tegra'", "auto|nvml"}},
		{`reservationCheck: deny`, []string{"/reservationCheck'", "'deny'", "off|warn|refuse"}},
		{`owners: {occupancy: off}`, []string{"/owners/occupancy'", "got boolean"}},
		{`nvidiaDriverRoot: run/nvidia`, []string{"/nvidiaDriverRoot'", "'run/nvidia'", "^/"}},
		{`image: {digest: sha256:12}`, []string{"/image/digest'", "'sha256:12'"}},
		{`image: {pullPolicy: always}`, []string{"/image/pullPolicy'", "'always'", "Always"}},
		{`image: {repository: "k8s gpu"}`, []string{"/image/repository'", "'k8s gpu'"}},
		{`image: {repository: "ghcr.io/x:1"}`, []string{"/image/repository'", "'ghcr.io/x:1'"}},
		{`fullnameOverride: GPUs`, []string{"/fullnameOverride'", "'GPUs'"}},
		{`httpPort: 70000`, []string{"/httpPort'", "70,000", "65,535"}},
		{`httpPort: 80`, []string{"/httpPort'", "80", "1,024"}},
		{`tolerations: [{operator: Exist}]`, []string{"/tolerations/0/operator'", "'Exist'", "Exists"}},
		{`updateStrategy: {type: Recreate}`, []string{"/updateStrategy/type'", "'Recreate'", "OnDelete"}},
		{`resources: {limits: {memory: 96MB}}`, []string{"/resources/limits/memory'", "'96MB'"}},
		{`cdi: {disableHooks: enable_cuda_compat}`, []string{"/cdi/disableHooks'", "'enable_cuda_compat'"}},
		{`nodeSelector: {gpu: "a b"}`, []string{"/nodeSelector/gpu'", "'a b'"}},
		{`podMonitor: {interval: 30}`, []string{"/podMonitor/interval'", "got number"}},
		{`podMonitor: {interval: 30 s}`, []string{"/podMonitor/interval'", "'30 s'"}},
		{`config: {fallbackStrategies: [first]}`, []string{"/config/fallbackStrategies/0'", "'first'", "named"}},
		{`config: {map: {default: {flags: {migStrategy: mixd}}}}`, []string{"/config/map/default/flags/migStrategy'", "'mixed'"}},
		{`config: {map: {"a b": {}}}`, []string{"config.map: \"a b\""}},
		{`pools: [{name: A, nodeSelector: {a: b}}]`, []string{"/pools/0/name'", "'A'"}},
		{`pools: [{name: a}]`, []string{"/pools/0'", "missing property 'nodeSelector'"}},
		{`pools: [{name: a, nodeSelector: {}}]`, []string{"/pools/0/nodeSelector'", "got 0, want 1"}},
		// values that contradict each other, and files that are wrong
		{`{config: {name: a, map: {default: {version: v1}}}}`, []string{"config.name: a: it excludes config.map"}},
		{`config: {default: c, map: {a: {version: v1}, b: {version: v1}}}`, []string{"config.default: c: config.map has no such", "a, b"}},
		{`config: {map: {a: {version: v1}, b: {version: v1}}}`, []string{"config.default: it is empty"}},
		{`config: {default: x}`, []string{"config.default: x: neither config.map nor config.name"}},
		{`config: {map: {default: "a: [1"}}`, []string{"config.map.default: it is no YAML mapping"}},
		{`config: {map: {default: {}, A.b: {}, a-b: {}}}`, []string{"config.map.a-b: its ConfigMap would have the name of that of A.b"}},
		{`{config: {map: {default: {}, unused: {}}}, pools: [{name: a, nodeSelector: {a: b}}]}`, []string{"config.map.unused: no pool uses it"}},
		{`pools: [{name: a, nodeSelector: {a: b}, config: c}]`, []string{"pools[a].config: c: config.map has no such configuration"}},
		{`pools: [{name: a, nodeSelector: {a: b}}, {name: a, nodeSelector: {a: c}}]`, []string{"pools: a: two pools have this name"}},
		{`{pools: [` + apart(12) + `]}`, []string{"pools: the nodes that are in none of them take more than 100 node selector terms", "one label"}},
		{`{fullnameOverride: ` + strings.Repeat("a", 50) + `, pools: [{name: training-nodes, nodeSelector: {a: b}}]}`, []string{"longer than 63 characters"}},
		{`{passDeviceSpecs: false, compatWithCPUManager: true}`, []string{"passDeviceSpecs: false: compatWithCPUManager", "true"}},
		{`{cdi: {privileged: true}, deviceListStrategy: envvar}`, []string{`deviceListStrategy: "envvar"`, "cdi.privileged: true"}},
		{`{mps: {enabled: false}, config: {map: {default: {policy: {rules: [{select: {index: 0}, use: mps, replicas: 2, memory: 1GiB}]}}}}}`, []string{"mps.enabled: false: configuration default shares GPUs by MPS"}},
		{`reset: {enable: true}`, []string{"/reset'", "'enable'"}},
		{`reset: {program: nvidia-smi}`, []string{"/reset/program'", "'nvidia-smi'"}},
		{`{reset: {enabled: true}, config: {map: {default: {version: v1}}}}`, []string{"reset.enabled: true: no configuration", "reset: {mode: act}"}},
		{`{reset: {enabled: false}, config: {map: {default: "reset: {mode: act}"}}}`, []string{"reset.enabled: false: configuration default has the section reset"}},
		{`config: {map: {default: "{reset: {mode: report}, health: {occupancy: off}}"}}`, []string{"configuration default has the section reset, and health.occupancy: off"}},
		{`pools: [{name: reset-server, nodeSelector: {a: b}}]`, []string{"pools: reset-server", "choose another"}},
		{`pools: [{name: a-limit-server, nodeSelector: {a: b}}]`, []string{"pools: a-limit-server", "choose another"}},
		{`memoryLimits: {enable: true}`, []string{"/memoryLimits'", "'enable'"}},
		{`{memoryLimits: {enabled: false}, config: {map: {default: "memoryLimits: {experimental: true}"}}}`, []string{"memoryLimits.enabled: false: configuration default has the section memoryLimits: set memoryLimits.read: true"}},
		{`{api: dra, memoryLimits: {enabled: false, read: true}, config: {map: {default: "memoryLimits: {experimental: true}"}}}`, []string{"with api: dra no pod would set limits"}},
		{`prove: {enable: true}`, []string{"/prove'", "'enable'"}},
		{`prove: {memory: 1GiB}`, []string{"/prove/memory'", "'1GiB'"}},
		{`{prove: {enabled: true}, config: {map: {default: {version: v1}}}}`, []string{"prove.enabled: true: no configuration", "prove: {command: [/usr/bin/k8s-gpu, prove-gpu, --json]}"}},
		{`{prove: {enabled: false}, config: {map: {default: {prove: {command: [/usr/bin/k8s-gpu, prove-gpu]}}}}}`, []string{"prove.enabled: false: configuration default has the section prove"}},
		{`{prove: {enabled: true}, nvidiaDriverCapabilities: utility}`, []string{"nvidiaDriverCapabilities: utility", "add compute"}},
		{`config: {map: {default: {prove: {command: [/usr/bin/check]}, health: {occupancy: "off"}}}}`, []string{"configuration default has the section prove, and health.occupancy: off"}},
		{`config: {map: {default: {flags: {nvidiaDriverRoot: /run/nvidia/driver}}}}`, []string{"nvidiaDriverRoot: /: configuration default has", "/run/nvidia/driver"}},
		{`config: {map: {default: {flags: {mpsRoot: /mps}}}}`, []string{"mps.root: /run/nvidia/mps: configuration default has", "/mps"}},
		{`stateDir: /etc`, []string{"stateDir: /etc: the agent or containers would write to /etc", "a folder with tandem or gpu in its name below /var/lib"}},
		{`mps: {root: /}`, []string{"mps.root: /: the agent or containers would write to /: set a folder with mps in its name"}},
		{`kubeletRoot: /var/lib/`, []string{"kubeletRoot: /var/lib/: the agent or containers would write to /var/lib: "}},
		{`nodeLabels: {enabled: true, file: /etc/passwd}`, []string{"nodeLabels.file: /etc/passwd: the agent or containers would write to /etc: "}},
		{`pools: [{name: a, nodeSelector: {a: b}, stateDir: /usr/lib}]`, []string{"pool a: stateDir: /usr/lib"}},
		{`{api: dra, deviceListStrategy: envvar}`, []string{`deviceListStrategy: "envvar"`, "api: dra"}},
		{`{api: dra, compatWithCPUManager: true}`, []string{"passDeviceSpecs: true", "api: dra"}},
		{`{api: dra, deviceIDStrategy: index}`, []string{"deviceIDStrategy: index", "api: dra"}},
		{`handOver: {enabled: true, condition: Ready}`, []string{"/handOver/condition'"}},
		{`handOver: {enabled: true, condition: ""}`, []string{"/handOver/condition'", "''"}},
		{`handOver: {enabled: true, secondCondition: "a'b"}`, []string{"/handOver/secondCondition'"}},
		{`handOver: {enabled: true, secondCondition: TandemGPUsHealthy}`, []string{"handOver.secondCondition: TandemGPUsHealthy", "handOver.condition"}},
		{`{handOver: {enabled: true}, serviceAccount: {name: default}}`, []string{"serviceAccount.name: default", "rights", "handOver.enabled"}},
		{`{handOver: {enabled: true}, config: {map: {default: "handOver: {condition: OtherReady}"}}}`, []string{"configuration default has handOver", "the value handOver"}},
		{`extraArgs: [--hand-over-events=false]`, []string{"extraArgs: --hand-over-events=false", "handOver"}},
		{`extraEnv: [{name: HAND_OVER, value: "true"}]`, []string{"extraEnv: HAND_OVER", "the value handOver"}},
		{`{api: dra, serviceAccount: {name: default}}`, []string{"serviceAccount.name: default", "rights"}},
		{`{config: {map: {default: {api: dra, dra: {kubeletDir: /data/kubelet}}}}}`, []string{"kubeletRoot: /var/lib/kubelet", "dra.kubeletDir: /data/kubelet"}},
		{`onUnhealthy: evict`, []string{"onUnhealthy: evict", "api: dra"}},
		{`extraArgs: [--api=dra]`, []string{"extraArgs: --api=dra"}},
		{`extraEnv: [{name: API, value: dra}]`, []string{"extraEnv: API", "the value api"}},
		{`extraEnv: [{name: NODE_NAME, value: a}]`, []string{"extraEnv: NODE_NAME"}},
		{`extraEnv: [{name: GFD_MIG_STRATEGY, value: mixed}]`, []string{"extraEnv: GFD_MIG_STRATEGY", "migStrategy"}},
		{`extraEnv: [{name: GFD_OUTPUT_FILE, value: /a}]`, []string{"extraEnv: GFD_OUTPUT_FILE", "nodeLabels"}},
		{`extraEnv: [{name: MIG_STRATEGY, value: mixed}]`, []string{"extraEnv: MIG_STRATEGY", "migStrategy"}},
		{`{networkPolicy: {enabled: true}, devicePlugin: {enableHostNetwork: true}}`, []string{"networkPolicy.enabled: true", "devicePlugin.enableHostNetwork"}},
		{`updateStrategy: {rollingUpdate: {maxSurge: 1}}`, []string{"updateStrategy.rollingUpdate", "not both"}},
		{`updateStrategy: {rollingUpdate: {maxUnavailable: 0%}}`, []string{"updateStrategy.rollingUpdate", "not both"}},
		{`{devicePlugin: {enableHostNetwork: true}, updateStrategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}}`, []string{"maxSurge", "port 9410 only once"}},
		{`prometheusRule: {disabled: [TandemDown]}`, []string{"prometheusRule.disabled: TandemDown"}},
		// values of NVIDIA's chart that have no meaning here
		{`image: {repository: nvcr.io/nvidia/k8s-device-plugin, tag: v0.18.0}`, []string{"image.repository: nvcr.io/nvidia/k8s-device-plugin", "NVIDIA"}},
		{`{gfd: {enabled: true}, serviceAccount: {name: default}}`, []string{"serviceAccount.name: default", "rights", "NodeFeature"}},
		{`gpuOperator: {onDriverUpgrade: drain}`, []string{"onDriverUpgrade"}},
		{`nfd: {master: {}}`, []string{"nfd:", "chart"}},
		{`{mps: {enabled: true, daemon: true}, cdi: {privileged: true}}`, []string{"mps.daemon: true", "docs/sharing.md"}},
		{`pools: [{name: mps-daemon, nodeSelector: {a: b}}]`, []string{"pools: mps-daemon", "choose another"}},
		{`devicePlugin: {enabled: false}`, []string{"devicePlugin.enabled: false", "api: dra"}},
		// and of its chart of the DRA driver
		{`resources: {gpus: {enabled: true}}`, []string{"resources.gpus", "api: dra"}},
		{`resources: {computeDomains: {enabled: true}}`, []string{"resources.computeDomains", "may stay"}},
		{`kubeletPlugin: {nodeSelector: {a: b}}`, []string{"kubeletPlugin", "nodeSelector"}},
		{`consumableShares: "4"`, []string{"consumableShares: 4", "config.map"}},
		{`featureGates: {NVMLDeviceHealthCheck: true}`, []string{"featureGates"}},
		{`gpuDriverConfig: {default: container, map: {container: "version: v1alpha1"}}`, []string{"gpuDriverConfig", "config.map", "migStrategy", "--node-label=nvidia.com/dra-driver-gpu.config"}},
		{`maskNvidiaDriverParams: true`, []string{"maskNvidiaDriverParams: true", "policy.include"}},
		{`maskNvidiaDriverParams: "true"`, []string{"maskNvidiaDriverParams: true"}},
		{`noTimestamp: "true"`, []string{"/noTimestamp'", "got string"}},
		{`nvidiaCDIHookPath: /usr/bin/nvidia-cdi-hook`, []string{"nvidiaCDIHookPath", "cdi.nvidiaHookPath"}},
		{`devicePlugin: {containers: {main: {env: []}}}`, []string{"devicePlugin.containers", "extraEnv"}},
		{`componentSelectorLabels: {enabled: true}`, []string{"componentSelectorLabels.enabled: true"}},
		{`configManager: {resources: {}}`, []string{"configManager", "the label of its node"}},
		{`logVerbosity: 5`, []string{"logVerbosity: 5", "logLevel"}},
		{`namespace: gpus`, []string{"namespace: gpus", "--namespace"}},
	} {
		_, err := render(t, parse(t, c.values))
		if err == nil {
			t.Errorf("accepted: %s", c.values)
			continue
		}
		if !oneLine(err, c.want) {
			t.Errorf("%s: no line has %q in\n%v", c.values, c.want, err)
		}
		if lines := problems(err); len(lines) > 1 {
			t.Errorf("%s: one mistake, %d lines:\n%v", c.values, len(lines), err)
		}
	}
}

// apart are pools by two labels each that no other pool has: the nodes of no pool are 2 to the power of n combinations of these.
func apart(n int) string {
	var all []string
	for i := range n {
		all = append(all, fmt.Sprintf("{name: p%d, nodeSelector: {a%d: x, b%d: x}}", i, i, i))
	}
	return strings.Join(all, ", ")
}

// All mistakes are reported at the same time: first those of names, types and words, then those between values.
func TestAllMistakesAtOnce(t *testing.T) {
	for want, text := range map[int]string{
		5: `{migStratgy: mixed, migStrategy: mixd, httpPort: "1", image: {pullPolicy: never}, pools: [{name: A, nodeSelector: {a: b}}]}`,
		4: `{namespace: a, nfd: {a: b}, logVerbosity: 1, prometheusRule: {enabled: true, disabled: [A]}}`,
		3: `{cdi: {privileged: true}, deviceListStrategy: envvar, extraEnv: [{name: NODE_NAME}], config: {map: {default: {flags: {mpsRoot: /mps}}}}}`,
	} {
		_, err := render(t, parse(t, text))
		if got := problems(err); len(got) != want {
			t.Errorf("%s: %d lines, want %d:\n%v", text, len(got), want, err)
		}
	}
}

// NVIDIA's hook sets the limits for the device plugin, so that no pod with rights for it is needed: the agent reads them.
func TestLimitsByTheHookAlone(t *testing.T) {
	files, err := render(t, parse(t, `{memoryLimits: {enabled: false, read: true}, config: {map: {default: "memoryLimits: {experimental: true}"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(slices.Collect(maps.Values(files)), "")
	if !strings.Contains(all, "/sys/fs/cgroup") || !strings.Contains(all, "/var/log/pods") || strings.Contains(all, "limit-server") {
		t.Errorf("what reads limits, and nothing that sets them:\n%s", all)
	}
}

// problems returns the lines of the message that name a mistake.
func problems(err error) []string {
	var lines []string
	for line := range strings.Lines(fmt.Sprint(err)) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "- ") && !strings.HasSuffix(line, "validation failed") {
			lines = append(lines, line)
		}
	}
	return lines
}

func oneLine(err error, want []string) bool {
	for _, line := range problems(err) {
		all := true
		for _, text := range want {
			all = all && strings.Contains(line, text)
		}
		if all {
			return true
		}
	}
	return false
}
