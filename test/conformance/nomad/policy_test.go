package nomad

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/nomad/nomad/structs"
)

// A policy that changes applies after a HUP, in the same process; one that is wrong leaves all as it is.
func Test07PolicyByHangup(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, m.policy(t, ""))
	whole := a.devices(t, 8, 8)
	hup := func(text string) {
		t.Helper()
		m.policy(t, text)
		if err := syscall.Kill(a.pid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	}
	pid, updates := a.pid(), len(a.Updates())
	hup("policy: {rules: [{select: {index: nine}, use: time-slicing, replicas: 4}, {select: {index: 1}, use: halved}]}\n")
	await(t, "both problems in the log", func() bool {
		logs := a.logs.String()
		return strings.Contains(logs, "nine") && strings.Contains(logs, "halved") && strings.Contains(logs, "previous policy remains in effect")
	})
	if !reflect.DeepEqual(a.devices(t, 8, 8), whole) || len(a.Updates()) != updates {
		t.Error("a policy with problems changed something")
	}
	hup(divided)
	groups := a.until(t, "shares", func(g []*structs.NodeDeviceResource) bool { return len(instances(g)) == 18 })
	if got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu-shared", 12)); got == nil {
		t.Error("twelve shares are not to be had")
	}
	hup("")
	if back := a.until(t, "whole GPUs", func(g []*structs.NodeDeviceResource) bool { return len(instances(g)) == 8 }); !reflect.DeepEqual(back, whole) {
		t.Error("not as before")
	}
	if a.pid() != pid || len(a.launches(t)) != 3 {
		t.Error("another process was started")
	}
}

// A plugin that dies while the policy file is bad comes back with the policy that was in force. Were it to refuse its
// configuration, Nomad would never start another one, and go on to give out GPUs that nobody can reserve.
func Test12KilledUnderABadPolicy(t *testing.T) {
	m := install(t, "h100x8")
	keys := m.policy(t, "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 4}]}\n")
	a := startAgent(t, m, keys)
	was := a.devices(t, 14, 14)
	await(t, "the policy to be kept", func() bool {
		_, err := os.Stat(filepath.Join(string(m), "state", "nomad-gpu.policy.yaml"))
		return err == nil
	})
	m.policy(t, "policy: {rules: [{select: {index: 1}, use: halved}]}\n")
	for range 3 {
		pid, updates := a.pid(), len(a.Updates())
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		await(t, "another process and its fingerprint", func() bool { return a.pid() != pid && len(a.Updates()) > updates })
		if !reflect.DeepEqual(a.devices(t, 14, 14), was) {
			t.Error("not as before")
		}
		if _, err := a.reserve(group(t, was, "gpu-shared", "H100"), m.uuid(t, 1)+"::3"); err != nil {
			t.Error(err)
		}
	}
	if !strings.Contains(a.logs.String(), "halved") {
		t.Error("nobody says what is wrong")
	}
}

// Everything that is wrong with a policy is in the error with which the agent does not start.
func Test06PolicyErrors(t *testing.T) {
	m := install(t, "t4")
	keys := m.policy(t, "policy:\n  rules:\n  - {select: {index: nine}, use: reserved}\n  - {select: {model: A}, use: halved}\n")
	keys["group_by"] = "rack"
	a := newAgent(t, m.config(keys))
	if a.load == nil {
		t.Fatal("it starts")
	}
	for _, want := range []string{"policy.yaml:4", "nine", "policy.yaml:5", "halved", `group_by = "rack": want none, numa or nvlink`} {
		if !strings.Contains(a.load.Error(), want) {
			t.Errorf("%q is not in: %v", want, a.load)
		}
	}
	a.end(t)
}
