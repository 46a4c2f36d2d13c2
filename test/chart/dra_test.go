package chart

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	netv1 "k8s.io/api/networking/v1"
	resourcev1 "k8s.io/api/resource/v1"
)

// workload is a pod, and where it came from.
type workload struct {
	name string
	pod  corev1.PodSpec
}

// A claim in docs/dra.md has no field that Kubernetes does not have.
func TestClaimsOfTheDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/dra.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllSubmatch(text, -1)
	if len(blocks) == 0 {
		t.Error("there is no block")
	}
	for _, block := range blocks {
		for _, o := range documents(t, string(block[1])) {
			if kind := o["kind"]; kind != "ResourceClaimTemplate" {
				t.Errorf("a %s", kind)
				continue
			}
			strict[resourcev1.ResourceClaimTemplate](t, o)
		}
	}
}

// The examples have no field that Kubernetes does not have, and their parts fit together: each pod uses each of its claims, each claim exists,
// and each request of a container is one of its claim.
func TestExamplesOfClaims(t *testing.T) {
	files, err := filepath.Glob(deploy + "/dra/examples/*.yaml")
	if err != nil || len(files) < 8 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) { checkExample(t, file) })
	}
}

func checkExample(t *testing.T, file string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	claims, pods := map[string]resourcev1.ResourceClaimSpec{}, []workload{}
	for _, o := range documents(t, string(text)) {
		switch o["kind"] {
		case "ResourceClaimTemplate":
			c := strict[resourcev1.ResourceClaimTemplate](t, o)
			claims["template "+c.Namespace+"/"+c.Name] = c.Spec.Spec
		case "ResourceClaim":
			c := strict[resourcev1.ResourceClaim](t, o)
			claims["claim "+c.Namespace+"/"+c.Name] = c.Spec
		case "Pod":
			p := strict[corev1.Pod](t, o)
			pods = append(pods, workload{p.Namespace + "/" + p.Name, p.Spec})
		case "Deployment":
			d := strict[appsv1.Deployment](t, o)
			pods = append(pods, workload{d.Namespace + "/" + d.Name, d.Spec.Template.Spec})
		case "DaemonSet":
			d := strict[appsv1.DaemonSet](t, o)
			pods = append(pods, workload{d.Namespace + "/" + d.Name, d.Spec.Template.Spec})
		case "Namespace":
			strict[corev1.Namespace](t, o)
		default:
			t.Errorf("a %s", o["kind"])
		}
	}
	if len(pods) == 0 {
		t.Error("there is no pod")
	}
	used := map[string]bool{}
	for _, w := range pods {
		for _, of := range w.claims(t, claims) {
			used[of] = true
		}
	}
	for name := range claims {
		if !used[name] {
			t.Errorf("no pod uses %s", name)
		}
	}
}

// claims returns the claims and templates that the pod uses, and reports what does not fit.
func (w workload) claims(t *testing.T, known map[string]resourcev1.ResourceClaimSpec) (used []string) {
	t.Helper()
	namespace, _, _ := strings.Cut(w.name, "/")
	of, named := map[string]resourcev1.ResourceClaimSpec{}, map[string]bool{}
	for _, c := range w.pod.ResourceClaims {
		key := ""
		if c.ResourceClaimName != nil {
			key = "claim " + namespace + "/" + *c.ResourceClaimName
		} else if c.ResourceClaimTemplateName != nil {
			key = "template " + namespace + "/" + *c.ResourceClaimTemplateName
		}
		spec, found := known[key]
		if !found {
			t.Errorf("%s: the claim %s is %q, which is not in the file", w.name, c.Name, key)
		}
		of[c.Name] = spec
		used = append(used, key)
	}
	for _, c := range w.pod.Containers {
		for _, use := range c.Resources.Claims {
			named[use.Name] = true
			if spec, found := of[use.Name]; !found || use.Request != "" && !hasRequest(spec, use.Request) {
				t.Errorf("%s: container %s has the claim %q, request %q", w.name, c.Name, use.Name, use.Request)
			}
		}
	}
	for name := range of {
		if !named[name] {
			t.Errorf("%s: no container has the claim %s", w.name, name)
		}
	}
	return used
}

func hasRequest(spec resourcev1.ResourceClaimSpec, name string) bool {
	for _, r := range spec.Devices.Requests {
		if r.Name == name {
			return true
		}
	}
	return false
}

// A NetworkPolicy lets the pods reach the API server where they have the API dra, and nothing else.
func TestNetworkPolicyOfDRA(t *testing.T) {
	for name, want := range map[string]struct {
		values string
		ports  []int32
		peers  int
		egress int
	}{
		"device plugin": {`{networkPolicy: {enabled: true}}`, nil, 0, 0},
		"any address":   {`{api: dra, networkPolicy: {enabled: true}}`, []int32{443, 6443}, 0, 1},
		"one address":   {`{api: dra, networkPolicy: {enabled: true, apiServer: [{ipBlock: {cidr: 10.0.0.1/32}}], apiServerPorts: [8443]}}`, []int32{8443}, 1, 1},
	} {
		all := objects(t, parse(t, want.values))
		i := slices.IndexFunc(all, func(o object) bool { return o["kind"] == "NetworkPolicy" })
		policy := strict[netv1.NetworkPolicy](t, all[i])
		if len(policy.Spec.Egress) != want.egress || len(policy.Spec.PolicyTypes) != 2 {
			t.Errorf("%s: %+v", name, policy.Spec)
			continue
		}
		for _, rule := range policy.Spec.Egress {
			var ports []int32
			for _, p := range rule.Ports {
				ports = append(ports, p.Port.IntVal)
			}
			if !slices.Equal(ports, want.ports) || len(rule.To) != want.peers {
				t.Errorf("%s: %+v", name, rule)
			}
		}
	}
}
