package main

import (
	"errors"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/test/check"
)

// With the API dra the agent finds its node's name, and mounts the folder of its socket at the path of the host, which the kubelet opens.
func TestDaemonSetWithDRA(t *testing.T) {
	d := patch(t, "../../deploy/dra/kustomization.yaml")
	base, c := component(t, "../../deploy/daemonset.yaml"), d.Spec.Template.Spec.Containers[0]
	env := base.env()
	maps.Copy(env, c.env())
	s, err := resolveAll(t, base.Args, env, "")
	check.NoError(t, errors.Join(err, s.CheckNode()))
	registry := s.DRA.KubeletDir + "/plugins_registry"
	if v := d.Spec.Template.Spec.Volumes; s.Core.API != inventory.DRA || s.DRA.API.Configured() || !c.mounts()[registry] || len(v) != 1 || v[0].HostPath.Path != registry {
		t.Errorf("API %s, %+v, mounts %+v, volumes %+v", s.Core.API, s.DRA, c.VolumeMounts, v)
	}
	if strategy := s.Strategies; !strategy.CDICRI || strategy.EnvVar {
		t.Errorf("strategies %s", strategy)
	}
}

// The classes and the admission policy that are shipped are the output of "k8s-gpu classes" for nodes without a configuration: the policy is
// printed after the classes.
func TestShippedClasses(t *testing.T) {
	print := classes(func() (settings, error) { return resolveAll(t, nil, nil, "") })
	for _, files := range [][]string{{"classes"}, {"classes", "admission"}} {
		got, err := print(cli.Classes{ExtendedResources: true, AdmissionPolicy: len(files) > 1, ServiceAccount: "tandem-k8s-gpu"})
		check.NoError(t, err)
		var want []string
		for _, name := range files {
			text, err := os.ReadFile("../../deploy/dra/" + name + ".yaml")
			check.NoError(t, err)
			want = append(want, string(text))
		}
		if string(got) != strings.Join(want, "---\n") {
			t.Errorf("k8s-gpu classes prints\n%s\nbut deploy/dra has %s:\n%s", got, files, want)
		}
	}
}

// The agent's role has the rights that its requests need, and no others. (That they suffice is shown by test/e2e, TestChart.)
func TestRoleIsWhatTheAgentNeeds(t *testing.T) {
	deny := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) }))
	defer deny.Close()
	client, err := kubeapi.New(kubeapi.Options{Address: deny.URL})
	check.NoError(t, err)
	ctx := t.Context()
	methods := map[string]func() error{
		"Claim":       func() error { _, err := client.Claim(ctx, "default", "c"); return err },
		"Node":        func() error { _, err := client.Node(ctx, "n"); return err },
		"Slices":      func() error { _, err := client.Slices(ctx, kubeapi.SliceSelector{}); return err },
		"Slice":       func() error { _, err := client.Slice(ctx, "s"); return err },
		"CreateSlice": func() error { _, err := client.CreateSlice(ctx, kubeapi.ResourceSlice{}, kubeapi.Store); return err },
		"UpdateSlice": func() error { _, err := client.UpdateSlice(ctx, kubeapi.ResourceSlice{}, kubeapi.Store); return err },
		"DeleteSlice": func() error { return client.DeleteSlice(ctx, "s", "") },
		"Classes":     func() error { _, err := client.Classes(ctx); return err },
		"WatchSlices": func() error {
			for _, err := range client.WatchSlices(ctx, kubeapi.SliceSelector{}, "1") {
				return err
			}
			return nil
		},
		"NodeMetadata": func() error { _, err := client.NodeMetadata(ctx, "n"); return err },
		"WatchNode": func() error {
			for _, err := range client.WatchNode(ctx, "n", "1") {
				return err
			}
			return nil
		},
		"PodMetadata": func() error { _, err := client.PodMetadata(ctx, "ns", "p"); return err },
		"NodeFeature": func() error { _, err := client.NodeFeature(ctx, "ns", "f"); return err },
		"CreateNodeFeature": func() error {
			return client.CreateNodeFeature(ctx, kubeapi.NodeFeature{Metadata: kubeapi.ObjectMeta{Namespace: "ns"}})
		},
		"UpdateNodeFeature": func() error {
			return client.UpdateNodeFeature(ctx, kubeapi.NodeFeature{Metadata: kubeapi.ObjectMeta{Namespace: "ns", Name: "f"}})
		},
		"NodeConditions":  func() error { _, _, err := client.NodeConditions(ctx, "n"); return err },
		"PatchNodeStatus": func() error { return client.PatchNodeStatus(ctx, "n", kubeapi.NodePatch{}, kubeapi.Store) },
		"CreateEvent": func() error {
			return client.CreateEvent(ctx, kubeapi.PodEvent{Metadata: kubeapi.ObjectMeta{Namespace: "ns"}})
		},
		"Server": nil, "CloseIdleConnections": nil, "Credentials": nil, // no requests
	}
	for i := range reflect.TypeFor[*kubeapi.Client]().NumMethod() {
		if name := reflect.TypeFor[*kubeapi.Client]().Method(i).Name; !slices.Contains(slices.Collect(maps.Keys(methods)), name) {
			t.Errorf("this test does not call %s", name)
		}
	}
	beside := map[string]bool{"NodeMetadata": true, "WatchNode": true, "PodMetadata": true, "NodeFeature": true, "CreateNodeFeature": true, "UpdateNodeFeature": true}
	handOver := map[string]bool{"NodeConditions": true, "PatchNodeStatus": true, "CreateEvent": true}
	want, wantBeside, wantHandOver := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for name, call := range methods {
		if call == nil {
			continue
		}
		err := call()
		rule := regexp.MustCompile(`needs the rule (.*})`).FindStringSubmatch(errorText(err))
		if rule == nil {
			t.Fatalf("%s: %v", name, err)
		}
		into := want
		switch {
		case beside[name]:
			into = wantBeside
		case handOver[name]:
			into = wantHandOver
		}
		addRights(t, "rules: ["+rule[1]+"]", into)
	}
	text, err := os.ReadFile("../../deploy/dra/access.yaml")
	check.NoError(t, err)
	got := map[string]bool{}
	for _, document := range strings.Split(string(text), "\n---\n") {
		addRights(t, document, got)
	}
	if !maps.Equal(got, want) {
		t.Errorf("the role allows %q, the agent needs %q", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
	}
	template, err := os.ReadFile("../../deploy/chart/templates/access.yaml") // beside the API dra
	check.NoError(t, err)
	gotBeside := map[string]bool{}
	for _, rules := range regexp.MustCompile(`(?m)^rules:\n(?: .*\n)+`).FindAllString(string(template), -1) {
		addRights(t, rules, gotBeside)
	}
	if !maps.Equal(gotBeside, wantBeside) {
		t.Errorf("the roles of the chart allow %q, the agent needs %q", slices.Sorted(maps.Keys(gotBeside)), slices.Sorted(maps.Keys(wantBeside)))
	}
	// deploy/hand-over has these.
	if rights := map[string]bool{"get /nodes": true, "patch /nodes/status": true, "create events.k8s.io/events": true}; !maps.Equal(wantHandOver, rights) {
		t.Errorf("the hand-over needs %q, want %q", slices.Sorted(maps.Keys(wantHandOver)), slices.Sorted(maps.Keys(rights)))
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// addRights adds the rights of a role: "get resource.k8s.io/resourceclaims".
func addRights(t *testing.T, text string, to map[string]bool) {
	t.Helper()
	var role struct {
		Rules []struct {
			Groups    []string `yaml:"apiGroups"`
			Resources []string
			Verbs     []string
		}
	}
	check.NoError(t, yaml.Unmarshal([]byte(text), &role))
	for _, rule := range role.Rules {
		for _, verb := range rule.Verbs {
			to[verb+" "+strings.Join(rule.Groups, ",")+"/"+strings.Join(rule.Resources, ",")] = true
		}
	}
}
