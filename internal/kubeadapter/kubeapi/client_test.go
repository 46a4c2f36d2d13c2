package kubeapi_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/test/check"
)

func client(t *testing.T, o kubeapi.Options) *kubeapi.Client {
	t.Helper()
	c, err := kubeapi.New(o)
	check.NoError(t, err)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func slice(name string, devices ...kubeapi.Device) kubeapi.ResourceSlice {
	return kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{Name: name},
		Spec: kubeapi.ResourceSliceSpec{
			Driver: "gpu.nvidia.com", NodeName: "n1", Devices: devices,
			Pool: kubeapi.ResourcePool{Name: "n1", Generation: 1, ResourceSliceCount: 1},
		},
	}
}

// The verbs, and what each answer means.
func TestVerbs(t *testing.T) {
	s := kubeapitest.Start(t)
	c := client(t, kubeapi.Options{Address: s.URL, Agent: "tandem/test"})
	ctx := t.Context()
	node := s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1"}})
	s.PutClaim(kubeapi.ResourceClaim{Metadata: kubeapi.ObjectMeta{Namespace: "team", Name: "train", UID: "u1"}})
	if got, err := c.Node(ctx, "n1"); err != nil || got.Metadata.UID != node.Metadata.UID || got.Metadata.UID == "" {
		t.Errorf("node %+v, %v", got, err)
	}
	if got, err := c.Claim(ctx, "team", "train"); err != nil || got.Metadata.UID != "u1" {
		t.Errorf("claim %+v, %v", got, err)
	}
	made, err := c.CreateSlice(ctx, slice("a", kubeapi.Device{Name: "gpu-0"}), kubeapi.Store)
	if err != nil || made.Metadata.UID == "" || made.Metadata.ResourceVersion == "" {
		t.Fatalf("created %+v, %v", made, err)
	}
	if _, err := c.CreateSlice(ctx, slice("b"), kubeapi.DryRun); err != nil {
		t.Error(err)
	}
	next := made
	next.Spec.Pool.Generation = 2
	changed, err := c.UpdateSlice(ctx, next, kubeapi.Store)
	if err != nil || changed.Spec.Pool.Generation != 2 || changed.Metadata.ResourceVersion == made.Metadata.ResourceVersion {
		t.Errorf("updated %+v, %v", changed, err)
	}
	list, err := c.Slices(ctx, kubeapi.SliceSelector{Node: "n1", Driver: "gpu.nvidia.com"})
	if err != nil || len(list.Items) != 1 || list.Items[0].Metadata.Name != "a" || list.Metadata.ResourceVersion == "" {
		t.Errorf("listed %+v, %v", list, err)
	}
	if other, err := c.Slices(ctx, kubeapi.SliceSelector{Node: "n2"}); err != nil || len(other.Items) != 0 {
		t.Errorf("listed %+v of another node, %v", other, err)
	}
	for _, e := range []struct {
		name string
		call func() error
		want error
	}{
		{"create again", func() error { _, err := c.CreateSlice(ctx, slice("a"), kubeapi.Store); return err }, kubeapi.ErrExists},
		{"update of an old version", func() error { _, err := c.UpdateSlice(ctx, next, kubeapi.Store); return err }, kubeapi.ErrConflict},
		{"update of none", func() error { _, err := c.UpdateSlice(ctx, slice("none"), kubeapi.Store); return err }, kubeapi.ErrNotFound},
		{"delete of another UID", func() error { return c.DeleteSlice(ctx, "a", "other") }, kubeapi.ErrConflict},
		{"delete", func() error { return c.DeleteSlice(ctx, "a", made.Metadata.UID) }, nil},
		{"delete of none", func() error { return c.DeleteSlice(ctx, "a", "") }, kubeapi.ErrNotFound},
		{"claim of none", func() error { _, err := c.Claim(ctx, "team", "other"); return err }, kubeapi.ErrNotFound},
		{"slice of none", func() error { _, err := c.Slice(ctx, "a"); return err }, kubeapi.ErrNotFound},
	} {
		if err := e.call(); !errors.Is(err, e.want) || (e.want == nil) != (err == nil) {
			t.Errorf("%s: %v, want %v", e.name, err, e.want)
		}
	}
}

// Without a connection, or behind a load balancer without a server, a request costs the server nothing. One that is not answered may.
func TestUnreached(t *testing.T) {
	closed, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	check.NoError(t, err)
	_ = closed.Close()
	balancer, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	check.NoError(t, err)
	defer balancer.Close() //nolint:errcheck // the end of the test
	go func() {
		for conn, err := balancer.Accept(); err == nil; conn, err = balancer.Accept() {
			_ = conn.Close()
		}
	}()
	s := kubeapitest.StartTLS(t)
	cut := kubeapitest.Start(t)
	cut.Fail("get", 1, kubeapitest.Failure{})
	for name, o := range map[string]struct {
		kubeapi.Options
		want bool
	}{
		"refused":       {kubeapi.Options{Address: "http://" + closed.Addr().String()}, true},
		"load balancer": {kubeapi.Options{Address: "https://" + balancer.Addr().String(), CAFile: s.CAFile, TokenFile: s.TokenFile}, true},
		"cut":           {kubeapi.Options{Address: cut.URL}, false},
		"no token":      {kubeapi.Options{Address: s.URL, CAFile: s.CAFile, TokenFile: "/nonexistent"}, false},
	} {
		_, err := client(t, o.Options).Claim(t.Context(), "ns", "c")
		if errors.Is(err, kubeapi.ErrUnreached) != o.want || !errors.Is(err, kubeapi.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Each error has verb, object, server and remedy, and can be matched.
func TestErrors(t *testing.T) {
	answers := map[string]struct {
		code int
		body string
		want error
		text []string
	}{
		"forbidden": {403, `{"kind":"Status","reason":"Forbidden","message":"resourceclaims.resource.k8s.io \"c\" is forbidden: User \"u\" cannot get"}`,
			kubeapi.ErrForbidden, []string{"get resourceclaims ns/c at http://", "403", "cannot get", `{apiGroups: ["resource.k8s.io"], resources: ["resourceclaims"], verbs: ["get"]}`}},
		"policy": {422, `{"kind":"Status","reason":"Invalid","message":"x is forbidden: ValidatingAdmissionPolicy 'tandem' with binding 'tandem' denied request: other node"}`,
			kubeapi.ErrForbidden, []string{"other node", "bound to a pod of this node"}},
		"unserved":    {404, "404 page not found\n", kubeapi.ErrNotFound, []string{"does not serve resource.k8s.io/v1", "1.34"}},
		"expired":     {410, `{"kind":"Status","reason":"Expired","message":"too old"}`, kubeapi.ErrGone, []string{"too old"}},
		"token":       {401, `{"kind":"Status","reason":"Unauthorized","message":"Unauthorized"}`, kubeapi.ErrUnauthorized, []string{"read anew"}},
		"busy":        {429, `{"kind":"Status","reason":"TooManyRequests","message":"slow down"}`, kubeapi.ErrUnavailable, []string{"slow down"}},
		"broken":      {503, "upstream gone", kubeapi.ErrUnavailable, []string{"upstream gone"}},
		"invalid":     {422, `{"kind":"Status","reason":"Invalid","message":"spec.devices[0].name"}`, kubeapi.ErrInvalid, []string{"spec.devices[0].name"}},
		"no json":     {200, "<html>", kubeapi.ErrUnavailable, []string{"can't be decoded"}},
		"unknown":     {418, strings.Repeat("x", 5000), nil, []string{"418", "xxx..."}},
		"long answer": {200, `{"metadata":{"name":"` + strings.Repeat("x", 9<<20) + `"}}`, kubeapi.ErrUnavailable, []string{"too long"}},
	}
	for name, a := range answers {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(a.code)
				_, _ = w.Write([]byte(a.body))
			}))
			defer s.Close()
			_, err := client(t, kubeapi.Options{Address: s.URL}).Claim(t.Context(), "ns", "c")
			if err == nil || a.want != nil && !errors.Is(err, a.want) {
				t.Fatalf("%v, want %v", err, a.want)
			}
			for _, text := range a.text {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("%q lacks %q", err, text)
				}
			}
			if len(err.Error()) > 1000 {
				t.Errorf("%d bytes of text", len(err.Error()))
			}
		})
	}
}

// A redirect is not followed, for it would get the token.
func TestRedirectGetsNoToken(t *testing.T) {
	asked := false
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer other.Close()
	s := httptest.NewServer(http.RedirectHandler(other.URL+"/elsewhere", http.StatusTemporaryRedirect))
	defer s.Close()
	token := filepath.Join(t.TempDir(), "token")
	check.NoError(t, os.WriteFile(token, []byte("secret\n"), 0o600))
	_, err := client(t, kubeapi.Options{Address: s.URL, TokenFile: token}).Claim(t.Context(), "ns", "c")
	if err == nil || asked || !strings.Contains(err.Error(), "redirects to "+other.URL) || strings.Contains(err.Error(), "secret") {
		t.Errorf("asked: %t, error %v", asked, err)
	}
}

func TestAddress(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	for address, want := range map[string]string{
		"": "https://[fd00::1]:443", "https://10.0.0.1:6443": "https://10.0.0.1:6443", "https://api.example/": "https://api.example", "http://127.0.0.1:1": "http://127.0.0.1:1",
		"10.0.0.1:6443": "", "ftp://x": "", "https://": "", "https://u:p@x": "", "https://x/path": "", "https://x?y=z": "", "://": "",
	} {
		c, err := kubeapi.New(kubeapi.Options{Address: address})
		var bad *kubeapi.AddressError
		if want == "" && (!errors.As(err, &bad) || !strings.Contains(err.Error(), "https://host:port")) {
			t.Errorf("%q: %v", address, err)
		}
		if want != "" && (err != nil || c.Server() != want) {
			t.Errorf("%q: %v", address, err)
		}
	}
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := kubeapi.New(kubeapi.Options{}); err == nil || !strings.Contains(err.Error(), "KUBERNETES_SERVICE_HOST") {
		t.Error(err)
	}
}

// A token that is replaced or expires, and CA certificates that are replaced, need no restart: case 36.
func TestCredentialsAreReadAnew(t *testing.T) {
	s := kubeapitest.StartTLS(t)
	s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1"}})
	c := client(t, kubeapi.Options{Address: s.URL, TokenFile: s.TokenFile, CAFile: s.CAFile})
	works := func(when string) {
		t.Helper()
		if _, err := c.Node(t.Context(), "n1"); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
	fails := func(when string, texts ...string) {
		t.Helper()
		_, err := c.Node(t.Context(), "n1")
		for _, text := range texts {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v, want %q", when, err, text)
			}
		}
	}
	works("at first")
	s.SetToken("second")
	works("with another token")
	s.AcceptTokens("third")
	fails("with an expired token", "401", "read anew")
	if asked := s.Requests(); len(asked) != 4 {
		t.Errorf("%d requests, want two with the expired token", len(asked))
	}
	s.SetToken("third")
	works("with a new token")
	s.RotateCA(false)
	fails("with the CA certificates before the rotation", s.CAFile, "TLS")
	s.WriteCA()
	works("with the new CA certificates")
	for path, text := range map[string]string{s.TokenFile: "token: open " + s.TokenFile, s.CAFile: "CA certificates: open " + s.CAFile} {
		content, err := os.ReadFile(path)
		check.NoError(t, err)
		check.NoError(t, os.Remove(path))
		c.CloseIdleConnections()
		fails("without "+path, text)
		check.NoError(t, os.WriteFile(path, content, 0o600))
		works("with " + path)
	}
}

// A spec with fields that this package lacks is recognised, so that it never counts as equal to one without them.
func TestUnknownFields(t *testing.T) {
	s := kubeapitest.Start(t)
	c := client(t, kubeapi.Options{Address: s.URL})
	for spec, want := range map[string]string{
		`{"driver":"d","nodeName":"n","devices":[{"name":"x","bindsToNode":true}]}`: `"bindsToNode"`,
		`{"driver":"d","nodeName":"n","sharedCounters":[]}`:                         `"sharedCounters"`,
		`{"driver":"d","nodeName":"n","devices":[{"name":"x"}]}`:                    "",
	} {
		s.PutRaw("a", []byte(`{"metadata":{},"spec":`+spec+`}`))
		got, err := c.Slice(t.Context(), "a")
		if err != nil || got.Spec.Unknown != want || got.Spec.Driver != "d" {
			t.Errorf("%s: %+v, %v", spec, got.Spec, err)
		}
	}
}

func TestDeadline(t *testing.T) {
	s := kubeapitest.Start(t)
	s.Hang()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := fmt.Errorf("the agent stops")
	go func() {
		for len(s.Requests()) == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel(cause)
	}()
	if _, err := client(t, kubeapi.Options{Address: s.URL}).Node(ctx, "n"); !errors.Is(err, cause) || !errors.Is(err, kubeapi.ErrUnavailable) {
		t.Error(err)
	}
}

// The labels of a Node are read and watched without its status; NodeFeature objects are created and replaced.
func TestNodeObjects(t *testing.T) {
	s := kubeapitest.Start(t)
	c := client(t, kubeapi.Options{Address: s.URL})
	ctx := t.Context()
	put := func(name, value string) {
		s.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: name, Labels: map[string]string{"config": value}}})
	}
	put("n1", "a")
	read, err := c.NodeMetadata(ctx, "n1")
	if err != nil || read.Labels["config"] != "a" || read.ResourceVersion == "" {
		t.Fatalf("%+v, %v", read, err)
	}
	put("other", "c")
	put("n1", "b")
	for e, err := range c.WatchNode(ctx, "n1", read.ResourceVersion) {
		check.NoError(t, err)
		if e.Type == kubeapi.Opened {
			continue
		}
		if e.Type != kubeapi.Modified || e.Node.Name != "n1" || e.Node.Labels["config"] != "b" {
			t.Errorf("event %+v", e)
		}
		break
	}
	f := kubeapi.NodeFeature{Metadata: kubeapi.ObjectMeta{Namespace: "ns", Name: "f"}, Spec: kubeapi.NodeFeatureSpec{Labels: map[string]string{"a": "b"}}}
	check.NoError(t, c.CreateNodeFeature(ctx, f))
	if err := c.CreateNodeFeature(ctx, f); !errors.Is(err, kubeapi.ErrExists) {
		t.Error(err)
	}
	stored, err := c.NodeFeature(ctx, "ns", "f")
	check.NoError(t, err)
	stored.Spec.Labels["a"] = "c"
	check.NoError(t, c.UpdateNodeFeature(ctx, stored))
	if err := c.UpdateNodeFeature(ctx, stored); !errors.Is(err, kubeapi.ErrConflict) {
		t.Error(err)
	}
	if got, _ := s.NodeFeature("ns", "f"); got.Spec.Labels["a"] != "c" || got.Spec.Features.Flags == nil || got.APIVersion != "nfd.k8s-sigs.io/v1alpha1" {
		t.Errorf("stored %+v", got)
	}
	s.PutPod(kubeapi.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"})
	if pod, err := c.PodMetadata(ctx, "ns", "p"); err != nil || pod.UID != "u" {
		t.Errorf("%+v, %v", pod, err)
	}
}

// A patch of a Node's status changes what it names, and nothing else: one condition, one annotation, both removed. An admission policy that
// denies it is told apart from other answers.
func TestPatchNodeStatus(t *testing.T) {
	s := kubeapitest.Start(t)
	c := client(t, kubeapi.Options{Address: s.URL})
	ctx := t.Context()
	foreign := `{"metadata":{"name":"n1","uid":"u","labels":{"a":"b"},"annotations":{"other":"1"}},"spec":{"podCIDR":"10.0.0.0/24"},` +
		`"status":{"capacity":{"cpu":"8"},"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"2026-11-27T12:00:00Z"}],"images":[{"names":["x"],"sizeBytes":1}]}}`
	s.PutRawNode("n1", []byte(foreign))
	before := string(s.RawNode("n1"))
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	var p kubeapi.NodePatch
	p.Metadata.Annotations = map[string]*string{"own": new("x")}
	p.Status.Conditions = []kubeapi.NodeCondition{{Type: "GPUs", Status: kubeapi.ConditionFalse, LastTransitionTime: &at}}
	check.NoError(t, c.PatchNodeStatus(ctx, "n1", p, kubeapi.DryRun))
	if after := string(s.RawNode("n1")); after != before {
		t.Errorf("a dry run has changed %s to %s", before, after)
	}
	s.GuardNodes("own", "GPUs")
	check.NoError(t, c.PatchNodeStatus(ctx, "n1", p, kubeapi.Store))
	p.Status.Conditions[0] = kubeapi.NodeCondition{Type: "GPUs", Status: kubeapi.ConditionTrue}
	check.NoError(t, c.PatchNodeStatus(ctx, "n1", p, kubeapi.Store))
	meta, conditions, err := c.NodeConditions(ctx, "n1")
	if err != nil || meta.Annotations["own"] != "x" || len(conditions) != 2 || conditions[1].Status != kubeapi.ConditionTrue || !conditions[1].LastTransitionTime.Equal(at) {
		t.Errorf("%+v, %+v, %v", meta, conditions, err)
	}
	p.Metadata.Annotations["own"] = nil
	p.Status.Conditions[0].Patch = kubeapi.DeleteCondition
	check.NoError(t, c.PatchNodeStatus(ctx, "n1", p, kubeapi.Store))
	version := regexp.MustCompile(`"resourceVersion":"[0-9]+"`)
	if after := string(s.RawNode("n1")); version.ReplaceAllString(after, "") != version.ReplaceAllString(before, "") {
		t.Errorf("left %s\nwant %s", after, before)
	}
	p.Metadata.Labels = map[string]*string{"x": nil, "y": new("z")}
	if err = c.PatchNodeStatus(ctx, "n1", p, kubeapi.DryRun); !errors.Is(err, kubeapi.ErrForbidden) || !strings.Contains(err.Error(), "patch nodes/status n1") {
		t.Errorf("a label: %v", err)
	}
	s.Deny("patch", "nodes/status")
	if err = c.PatchNodeStatus(ctx, "n1", p, kubeapi.Store); !errors.Is(err, kubeapi.ErrForbidden) || !strings.Contains(err.Error(), `resources: ["nodes/status"], verbs: ["patch"]`) {
		t.Errorf("without the right: %v", err)
	}
}

// An event is created once under a name.
func TestCreateEvent(t *testing.T) {
	s := kubeapitest.Start(t)
	c := client(t, kubeapi.Options{Address: s.URL})
	e := kubeapi.PodEvent{
		Metadata: kubeapi.ObjectMeta{Namespace: "team", Name: "e1"}, EventTime: kubeapi.MicroTime{Time: time.Unix(1, 5000).In(time.FixedZone("", 3600))},
		ReportingController: "example.com/agent", ReportingInstance: "n1", Action: "Report", Reason: "Fault", Type: "Warning", Note: "text",
		Regarding: kubeapi.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "team", Name: "p", UID: "u"},
	}
	check.NoError(t, c.CreateEvent(t.Context(), e))
	if err := c.CreateEvent(t.Context(), e); !errors.Is(err, kubeapi.ErrExists) {
		t.Error(err)
	}
	if all := s.Events(); len(all) != 1 || all[0].Regarding != e.Regarding || !all[0].EventTime.Equal(e.EventTime.Time) {
		t.Errorf("%+v", all)
	}
	e.Metadata.Name, e.Action = "e2", ""
	if err := c.CreateEvent(t.Context(), e); !errors.Is(err, kubeapi.ErrInvalid) {
		t.Error(err)
	}
}
