package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// Everything that is not possible with the API dra is named at once, wherever it is set; by default, and with the setting of the shipped
// manifests, containers get their devices by CDI.
func TestAPIOfDRA(t *testing.T) {
	_, err := resolveAll(t, []string{"--api=dra", "--pass-device-specs=true"}, map[string]string{"DEVICE_LIST_STRATEGY": "volume-mounts,cdi-annotations", "DEVICE_ID_STRATEGY": "index"},
		"policy:\n  rules:\n  - {select: {index: 0}, use: time-slicing, replicas: 2, failRequestsGreaterThanOne: true}\n")
	var problems []string
	for line := range strings.SplitSeq(errorText(err), "\n") {
		key, _, _ := strings.Cut(line, " = ")
		problems = append(problems, key)
	}
	if diff := cmp.Diff([]string{"DEVICE_LIST_STRATEGY", "--pass-device-specs", "DEVICE_ID_STRATEGY", "c.yaml:3: policy.rules[0].failRequestsGreaterThanOne"}, problems); diff != "" {
		t.Error(diff)
	}
	_, err = resolveAll(t, nil, nil, "api: dra\nhealth: {stateDir: \"\"}\n")
	sameProblems(t, err, `c.yaml:2: health.stateDir = "": with api dra the prepared claims are kept there, and Unprepare needs them: want a folder such as /var/lib/tandem`)
	cdi := inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}
	for _, env := range []map[string]string{nil, {"DEVICE_LIST_STRATEGY": "auto"}, {"DEVICE_LIST_STRATEGY": "cdi-cri", "PASS_DEVICE_SPECS": "false"}} {
		s, err := resolveAll(t, nil, env, "api: dra\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\nflags: {mpsRoot: /mps}\n")
		if err != nil || s.Core.API != inventory.DRA || s.Core.Injection != cdi || s.Strategies != (Strategies{CDICRI: true}) || len(s.Notes) > 0 {
			t.Errorf("%v: %+v, %v, %v", env, s.Core.Injection, s.Notes, err)
		}
		if s.CheckNode() == nil || !strings.Contains(strings.Join(s.Summary(), "\n"), "api: dra, driver gpu.nvidia.com, the agent also takes --node-name or NODE_NAME") {
			t.Errorf("the name of the node is not asked for: %v", s.Summary())
		}
	}
}

// With the default API the settings of dra change nothing; a change of the API needs another run.
func TestAPIOfDevicePlugins(t *testing.T) {
	plain, err := resolveAll(t, nil, nil, "")
	check.NoError(t, err)
	s, err := resolveAll(t, nil, map[string]string{"NODE_NAME": "node-1"}, "dra: {onUnhealthy: evict}\n")
	check.NoError(t, err, s.CheckNode())
	if diff := cmp.Diff([]string{"c.yaml:1: dra.onUnhealthy has no effect: device plugins have no taints; it belongs to api dra"}, withoutFolder(s.Notes)); diff != "" {
		t.Error(diff)
	}
	if s.Core.API != inventory.DevicePlugin || s.Core.Injection != plain.Core.Injection {
		t.Errorf("%+v", s.Core)
	}
	dra, err := resolveAll(t, []string{"--api=dra", "--node-name=node-1"}, nil, "")
	check.NoError(t, err, dra.CheckNode())
	if dra.DiffersInPolicyOnly(plain) {
		t.Error("the API is taken for a part of the policy")
	}
}
