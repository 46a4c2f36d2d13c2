package dra

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/apis/resource"
	_ "k8s.io/kubernetes/pkg/apis/resource/install"
	"k8s.io/kubernetes/pkg/registry/resource/resourceslice"
)

// apiServer is the part of Kubernetes' API that kubelets and DRA drivers use, over HTTPS. Slices are defaulted, reduced to the fields
// whose feature gates are on, and validated by the API server's own code.
type apiServer struct {
	t       *testing.T
	tls     *tls.Config
	address string
	dir     string // of ca.crt and token

	mu       sync.Mutex
	server   *http.Server // nil = not listening
	revision int64
	node     *v1.Node
	claims   map[types.NamespacedName]*resourceapi.ResourceClaim
	slices   map[string]*resourceapi.ResourceSlice
	events   []sliceEvent
	changed  chan struct{} // closed at the next event
	refused  []string      // answers with 4xx to writes of slices
}

// sliceEvent is a change of a slice.
type sliceEvent struct {
	at       time.Time
	kind     string // ADDED, MODIFIED, DELETED
	revision int64
	slice    *resourceapi.ResourceSlice // never written
}

const nodeName = "node-1"

var sliceKind = schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceslices"}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{
		t: t, dir: t.TempDir(), revision: 1, changed: make(chan struct{}),
		claims: map[types.NamespacedName]*resourceapi.ResourceClaim{}, slices: map[string]*resourceapi.ResourceSlice{},
		node: &v1.Node{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
			ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "6b1d5f5e-0000-4000-8000-000000000001", ResourceVersion: "1"},
			Status: v1.NodeStatus{NodeInfo: v1.NodeSystemInfo{
				ContainerRuntimeVersion: "containerd://2.4.2", KubeletVersion: "v1.37.1",
			}},
		},
	}
	certificate := httptest.NewTLSServer(nil) // for its key and certificate, which is for 127.0.0.1
	s.tls = certificate.TLS.Clone()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate.Certificate().Raw})
	certificate.Close()
	for name, text := range map[string]string{"ca.crt": string(ca), "token": "t0ken"} {
		if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.address = heldAddress(t)
	s.listen()
	t.Cleanup(s.goAway)
	return s
}

// heldAddress returns an address at which a server may listen, end and listen again: a socket that never listens has it until the test ends, so that no
// other one gets the port meanwhile.
func heldAddress(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	err = errors.Join(syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1), // as the server's has
		syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	if err != nil {
		t.Fatal(err)
	}
	own, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", own.(*syscall.SockaddrInet4).Port)
}

func (s *apiServer) url() string             { return "https://" + s.address }
func (s *apiServer) file(name string) string { return filepath.Join(s.dir, name) }

// listen starts to answer, at the same address as before.
func (s *apiServer) listen() {
	s.t.Helper()
	l, err := tls.Listen("tcp", s.address, s.tls)
	if err != nil {
		s.t.Fatal(err)
	}
	server := &http.Server{Handler: s.handler(), ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	s.mu.Lock()
	s.server = server
	s.mu.Unlock()
	go func() { _ = server.Serve(l) }()
}

// goAway ends all connections; nothing listens afterwards.
func (s *apiServer) goAway() {
	s.mu.Lock()
	server := s.server
	s.server = nil
	s.mu.Unlock()
	if server != nil {
		_ = server.Close()
	}
}

func (s *apiServer) handler() http.Handler {
	const group = "/apis/resource.k8s.io/v1"
	mux := http.NewServeMux()
	handle := func(pattern string, h func(*http.Request) (any, error)) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer t0ken" {
				reply(w, nil, apierrors.NewUnauthorized("Unauthorized"))
				return
			}
			object, err := h(r)
			reply(w, object, err)
		})
	}
	handle("GET /api/v1/nodes/{name}", s.getNode)
	handle("GET "+group+"/namespaces/{namespace}/resourceclaims/{name}", s.getClaim)
	handle("GET "+group+"/resourceslices/{name}", s.getSlice)
	handle("POST "+group+"/resourceslices", s.createSlice)
	handle("PUT "+group+"/resourceslices/{name}", s.updateSlice)
	handle("DELETE "+group+"/resourceslices/{name}", s.deleteSlice)
	handle("DELETE "+group+"/resourceslices", s.deleteSlices)
	mux.HandleFunc("GET "+group+"/resourceslices", func(w http.ResponseWriter, r *http.Request) {
		if watch, _ := strconv.ParseBool(r.URL.Query().Get("watch")); watch {
			s.watchSlices(w, r)
			return
		}
		list, err := s.listSlices(r)
		reply(w, list, err)
	})
	return mux
}

func reply(w http.ResponseWriter, object any, err error) {
	code := http.StatusOK
	if err != nil {
		status := apierrors.NewInternalError(err).ErrStatus
		var api apierrors.APIStatus
		if errors.As(err, &api) {
			status = api.Status()
		}
		status.APIVersion, status.Kind = "v1", "Status"
		object, code = &status, int(status.Code)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(object)
}

func (s *apiServer) getNode(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name := r.PathValue("name"); s.node == nil || name != s.node.Name {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, name)
	}
	return s.node, nil
}

func (s *apiServer) getClaim(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := types.NamespacedName{Namespace: r.PathValue("namespace"), Name: r.PathValue("name")}
	if c := s.claims[key]; c != nil {
		return c, nil
	}
	return nil, apierrors.NewNotFound(schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}, key.Name)
}

func (s *apiServer) getSlice(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slice := s.slices[r.PathValue("name")]; slice != nil {
		return slice, nil
	}
	return nil, apierrors.NewNotFound(sliceKind, r.PathValue("name"))
}

// admit is what the API server makes of a slice that is created or updated; old is nil for a new one.
func admit(body io.Reader, old *resourceapi.ResourceSlice) (*resourceapi.ResourceSlice, error) {
	in := &resourceapi.ResourceSlice{}
	decoder := json.NewDecoder(body)
	decoder.DisallowUnknownFields() // a real one drops them; the agent shall send none
	if err := decoder.Decode(in); err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	legacyscheme.Scheme.Default(in)
	object, was := &resource.ResourceSlice{}, &resource.ResourceSlice{}
	if err := legacyscheme.Scheme.Convert(in, object, nil); err != nil {
		return nil, err
	}
	ctx, strategy := context.Background(), resourceslice.Strategy
	var problems field.ErrorList
	if old == nil {
		strategy.PrepareForCreate(ctx, object)
		problems = strategy.Validate(ctx, object)
	} else {
		if err := legacyscheme.Scheme.Convert(old, was, nil); err != nil {
			return nil, err
		}
		if object.ResourceVersion != "" && object.ResourceVersion != old.ResourceVersion {
			return nil, apierrors.NewConflict(sliceKind, object.Name, errors.New("the object has been modified"))
		}
		object.ResourceVersion = old.ResourceVersion
		object.UID, object.CreationTimestamp = old.UID, old.CreationTimestamp
		strategy.PrepareForUpdate(ctx, object, was)
		problems = strategy.ValidateUpdate(ctx, object, was)
	}
	if len(problems) > 0 {
		return nil, apierrors.NewInvalid(schema.GroupKind{Group: sliceKind.Group, Kind: "ResourceSlice"}, object.Name, problems)
	}
	out := &resourceapi.ResourceSlice{}
	if err := legacyscheme.Scheme.Convert(object, out, nil); err != nil {
		return nil, err
	}
	out.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSlice"}
	return out, nil
}

func dryRun(r *http.Request) bool { return r.URL.Query().Get("dryRun") == "All" }

func (s *apiServer) createSlice(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slice, err := admit(r.Body, nil)
	if err != nil {
		return nil, s.refuse(err)
	}
	if slice.Name == "" {
		slice.Name = slice.GenerateName + strconv.FormatInt(s.revision, 36)
	}
	if s.slices[slice.Name] != nil {
		return nil, s.refuse(apierrors.NewAlreadyExists(sliceKind, slice.Name))
	}
	slice.UID = types.UID(fmt.Sprintf("slice-%d", s.revision))
	slice.CreationTimestamp = metav1.Now()
	if dryRun(r) {
		return slice, nil
	}
	s.put("ADDED", slice)
	return slice, nil
}

func (s *apiServer) updateSlice(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.slices[r.PathValue("name")]
	if old == nil {
		return nil, s.refuse(apierrors.NewNotFound(sliceKind, r.PathValue("name")))
	}
	slice, err := admit(r.Body, old)
	if err != nil {
		return nil, s.refuse(err)
	}
	if !dryRun(r) {
		s.put("MODIFIED", slice)
	}
	return slice, nil
}

func (s *apiServer) refuse(err error) error {
	s.refused = append(s.refused, err.Error())
	return err
}

func (s *apiServer) deleteSlice(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slice := s.slices[r.PathValue("name")]
	if slice == nil {
		return nil, apierrors.NewNotFound(sliceKind, r.PathValue("name"))
	}
	s.put("DELETED", slice.DeepCopy())
	return &metav1.Status{Status: metav1.StatusSuccess}, nil
}

// deleteSlices is what the kubelet asks for at its start.
func (s *apiServer) deleteSlices(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.selected(r)
	for _, slice := range all {
		s.put("DELETED", slice.DeepCopy())
	}
	return &metav1.Status{Status: metav1.StatusSuccess}, err
}

// put stores a slice or removes it. The caller holds mu.
func (s *apiServer) put(kind string, slice *resourceapi.ResourceSlice) {
	s.revision++
	slice.ResourceVersion = strconv.FormatInt(s.revision, 10)
	if kind == "DELETED" {
		delete(s.slices, slice.Name)
	} else {
		s.slices[slice.Name] = slice
	}
	s.events = append(s.events, sliceEvent{time.Now(), kind, s.revision, slice})
	close(s.changed)
	s.changed = make(chan struct{})
}

// selected are the slices that a request selects, by name. The caller holds mu.
func (s *apiServer) selected(r *http.Request) (all []*resourceapi.ResourceSlice, err error) {
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	for _, name := range slices.Sorted(maps.Keys(s.slices)) {
		if selector.Matches(sliceFields(s.slices[name])) {
			all = append(all, s.slices[name])
		}
	}
	return all, nil
}

func sliceFields(slice *resourceapi.ResourceSlice) fields.Set {
	set := fields.Set{"metadata.name": slice.Name, "spec.driver": slice.Spec.Driver, "spec.pool.name": slice.Spec.Pool.Name}
	if slice.Spec.NodeName != nil {
		set["spec.nodeName"] = *slice.Spec.NodeName
	}
	return set
}

func (s *apiServer) listSlices(r *http.Request) (any, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.selected(r)
	list := &resourceapi.ResourceSliceList{TypeMeta: metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceSliceList"}}
	list.ResourceVersion = strconv.FormatInt(s.revision, 10)
	for _, slice := range all {
		list.Items = append(list.Items, *slice)
	}
	return list, err
}

// watchSlices sends the events after a revision, without an end.
func (s *apiServer) watchSlices(w http.ResponseWriter, r *http.Request) {
	after, err := strconv.ParseInt(r.URL.Query().Get("resourceVersion"), 10, 64)
	if err != nil {
		reply(w, nil, apierrors.NewBadRequest("a watch takes a resourceVersion here: "+err.Error()))
		return
	}
	selector, err := fields.ParseSelector(r.URL.Query().Get("fieldSelector"))
	if err != nil {
		reply(w, nil, apierrors.NewBadRequest(err.Error()))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out := http.NewResponseController(w)
	_ = out.Flush()
	for encoder := json.NewEncoder(w); ; {
		s.mu.Lock()
		changed, events := s.changed, s.events
		s.mu.Unlock()
		for _, e := range events {
			if e.revision <= after || !selector.Matches(sliceFields(e.slice)) {
				continue
			}
			after = e.revision
			if encoder.Encode(map[string]any{"type": e.kind, "object": e.slice}) != nil || out.Flush() != nil {
				return
			}
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// state are all slices by name, all events so far, and a channel that is closed at the next event.
func (s *apiServer) state() (all []*resourceapi.ResourceSlice, events []sliceEvent, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.slices)) {
		all = append(all, s.slices[name])
	}
	return all, s.events, s.changed
}

// await waits for a state of the slices.
func (s *apiServer) await(what string, ok func([]*resourceapi.ResourceSlice) bool) {
	s.t.Helper()
	late := time.After(plenty)
	for {
		all, _, changed := s.state()
		if ok(all) {
			return
		}
		select {
		case <-changed:
		case <-late:
			s.t.Fatalf("%s: not in time: %s", what, describe(all))
		}
	}
}

// devices are those of all slices, by name. A name that is there twice fails the test.
func (s *apiServer) devices() map[string]resourceapi.Device {
	all, _, _ := s.state()
	return devicesOf(s.t, all)
}

func devicesOf(t *testing.T, all []*resourceapi.ResourceSlice) map[string]resourceapi.Device {
	devices := map[string]resourceapi.Device{}
	for _, slice := range all {
		for _, d := range slice.Spec.Devices {
			if _, twice := devices[d.Name]; twice {
				t.Errorf("%s is published twice", d.Name)
			}
			devices[d.Name] = d
		}
	}
	return devices
}

func describe(all []*resourceapi.ResourceSlice) string {
	text := fmt.Sprintf("%d slices", len(all))
	for _, slice := range all {
		text += fmt.Sprintf("\n%s generation %d:", slice.Name, slice.Spec.Pool.Generation)
		for _, d := range slice.Spec.Devices {
			text += fmt.Sprintf(" %s%v", d.Name, d.Taints)
		}
	}
	return text
}

func (s *apiServer) putClaim(c *resourceapi.ResourceClaim) {
	c.TypeMeta = metav1.TypeMeta{APIVersion: "resource.k8s.io/v1", Kind: "ResourceClaim"}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claims[types.NamespacedName{Namespace: c.Namespace, Name: c.Name}] = c
}
