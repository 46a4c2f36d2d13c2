package kube

import (
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
)

func fakeCluster(objects ...runtime.Object) (*Cluster, *fake.Clientset) {
	client := fake.NewClientset(objects...)
	return newCluster(Options{Name: "east", Mode: rescue.ModeAct}, client, client), client
}

func configMap(data map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "l", ResourceVersion: "7", Annotations: map[string]string{"team": "x"}}, Data: data,
	}
}

// A ledger that was created can be read, and be written by the one who read it last.
func TestStore(t *testing.T) {
	c, client := fakeCluster()
	s := c.Store("ns", "l")
	if got := s.String(); got != "ConfigMap ns/l in cluster east" {
		t.Error(got)
	}
	if _, _, err := s.Read(t.Context()); !errors.Is(err, fleet.ErrNoLedger) {
		t.Errorf("read what is missing: %v", err)
	}
	if _, err := s.Write(t.Context(), rescue.NewLedger(), "1"); !errors.Is(err, fleet.ErrNoLedger) {
		t.Errorf("write what is missing: %v", err)
	}
	if err := s.Create(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Create(t.Context()); !errors.Is(err, fleet.ErrExists) {
		t.Errorf("create it again: %v", err)
	}
	l, version, err := s.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	l.Term = 3
	setVersion(client, "8")
	if _, err := s.Write(t.Context(), l, version); !errors.Is(err, fleet.ErrConflict) {
		t.Errorf("write over what another process has written: %v", err)
	}
	if _, err := s.Write(t.Context(), l, "8"); err != nil {
		t.Error(err)
	}
	if l, _, err := s.Read(t.Context()); err != nil || l.Term != 3 {
		t.Errorf("%+v, %v", l, err)
	}
}

// setVersion has the ConfigMap of the ledger have a resourceVersion, which the fake does not count.
func setVersion(client *fake.Clientset, version string) {
	m := configMap(map[string]string{"ledger": `{"version":1,"term":1}`})
	m.ResourceVersion = version
	_ = client.Tracker().Update(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}, m, "ns")
}

// What others have in the object stays.
func TestStoreKeeps(t *testing.T) {
	c, client := fakeCluster(configMap(map[string]string{"ledger": `{"version":1,"term":1}`, "other": "1"}))
	if _, err := c.Store("ns", "l").Write(t.Context(), rescue.NewLedger(), "7"); err != nil {
		t.Fatal(err)
	}
	m, err := client.CoreV1().ConfigMaps("ns").Get(t.Context(), "l", metav1.GetOptions{})
	if err != nil || m.Data["other"] != "1" || m.Annotations["team"] != "x" {
		t.Errorf("%+v, %v", m, err)
	}
}

// A ledger that is damaged is not taken for an empty one.
func TestStoreDamaged(t *testing.T) {
	for name, data := range map[string]map[string]string{
		"no data": nil, "no key": {"x": "y"}, "empty": {"ledger": ""}, "no JSON": {"ledger": "{"}, "no version": {"ledger": "{}"}, "another version": {"ledger": `{"version":99}`},
	} {
		c, _ := fakeCluster(configMap(data))
		_, version, err := c.Store("ns", "l").Read(t.Context())
		if damaged := (*fleet.DamagedError)(nil); !errors.As(err, &damaged) || errors.Is(err, fleet.ErrNoLedger) || version != "7" {
			t.Errorf("%s: %v, version %q", name, err, version)
		}
	}
}

// A conflict at the write itself, errors of the server, and a ledger that is too long.
func TestStoreErrors(t *testing.T) {
	resource := schema.GroupResource{Resource: "configmaps"}
	for name, tc := range map[string]struct {
		err  error
		is   error
		text string
	}{
		"conflict": {apierrors.NewConflict(resource, "l", errors.New("modified")), fleet.ErrConflict, "another process"},
		"deleted":  {apierrors.NewNotFound(resource, "l"), fleet.ErrNoLedger, "init"},
		"no right": {apierrors.NewForbidden(resource, "l", errors.New("no")), nil, "forbidden"},
		"timeout":  {apierrors.NewTimeoutError("slow", 1), nil, "slow"},
	} {
		c, client := fakeCluster(configMap(map[string]string{"ledger": `{"version":1}`}))
		client.PrependReactor("update", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, tc.err })
		_, err := c.Store("ns", "l").Write(t.Context(), rescue.NewLedger(), "7")
		if err == nil || tc.is != nil && !errors.Is(err, tc.is) || !strings.Contains(err.Error(), tc.text) || tc.is == nil && errors.Is(err, fleet.ErrConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
	c, client := fakeCluster(configMap(map[string]string{"ledger": `{"version":1}`}))
	long := rescue.NewLedger()
	long.Stop = &rescue.Stop{At: time.Now(), Text: strings.Repeat("x", 64<<10)}
	if _, err := c.Store("ns", "l").Write(t.Context(), long, "7"); err == nil || len(client.Actions()) > 0 {
		t.Errorf("%v, %d requests", err, len(client.Actions()))
	}
}
