package bigfleet

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	batchv1 "k8s.io/api/batch/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// Kube is the API server of a Kubernetes cluster with a device plugin: lists, watches with their initial events and bookmarks, evictions, Leases and
// ConfigMaps, in protobuf. Kubelets send the status of their nodes every five minutes, agents renew reports with faults every 30 s.
type Kube struct {
	server
	stop func()

	objects sync.Mutex // guards all that follows
	version int
	all     map[string]*collection // by plural name
	faults  map[int]map[int]bool   // GPUs by node
	nodes   int
}

// collection are the objects of one resource.
type collection struct {
	list     func() runtime.Object
	names    []string
	rows     map[string]object
	watchers map[*watcher]bool
}

type object interface {
	metav1.Object
	runtime.Object
}

type watcher struct{ events chan []byte }

const (
	protobuf    = "application/vnd.kubernetes.protobuf"
	gpuResource = "nvidia.com/gpu"
	namespace   = "team"

	heartbeat = 5 * time.Minute // of a kubelet without a change: nodeStatusReportFrequency
	bookmarks = time.Minute
)

// NewKube returns a server of a cluster. It answers after Open.
func NewKube(nodes int) *Kube {
	k := &Kube{nodes: nodes, faults: map[int]map[int]bool{}, all: map[string]*collection{
		"nodes":                  newCollection(func() runtime.Object { return &corev1.NodeList{} }),
		"pods":                   newCollection(func() runtime.Object { return &corev1.PodList{} }),
		"jobs":                   newCollection(func() runtime.Object { return &batchv1.JobList{} }),
		"configmaps":             newCollection(func() runtime.Object { return &corev1.ConfigMapList{} }),
		"leases":                 newCollection(func() runtime.Object { return &coordinationv1.LeaseList{} }),
		"persistentvolumeclaims": newCollection(func() runtime.Object { return &corev1.PersistentVolumeClaimList{} }),
		"persistentvolumes":      newCollection(func() runtime.Object { return &corev1.PersistentVolumeList{} }),
		"resourceclaims":         newCollection(func() runtime.Object { return &resourcev1.ResourceClaimList{} }),
		"resourceslices":         newCollection(func() runtime.Object { return &resourcev1.ResourceSliceList{} }),
		"deviceclasses":          newCollection(func() runtime.Object { return &resourcev1.DeviceClassList{} }),
	}}
	for n := range nodes {
		k.put("nodes", newNode(n))
		for g := range GPUs {
			if n < nodes-1 {
				k.put("pods", newPod(n, g))
			}
		}
		if n%10 == 0 {
			k.put("jobs", newJob(n))
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { k.beat(ctx) })
	running.Go(func() { k.renew(ctx) })
	k.stop = func() { cancel(); running.Wait() }
	k.start(requestName, http.HandlerFunc(k.serve))
	return k
}

func newCollection(list func() runtime.Object) *collection {
	return &collection{list: list, rows: map[string]object{}, watchers: map[*watcher]bool{}}
}

// Close ends the server.
func (k *Kube) Close() {
	k.stop()
	k.server.Close()
}

// Config is the cluster in gpu-fleet's configuration.
func (k *Kube) Config(dir, mode string) (string, error) {
	path := filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf(`{"clusters":[{"name":"a","cluster":{"server":%q}}],"contexts":[{"name":"a","context":{"cluster":"a"}}],"current-context":"a"}`, k.http.URL)
	return fmt.Sprintf("{name: east, kind: kubernetes, mode: %s, kubeconfig: %s}", mode, path), os.WriteFile(path, []byte(text), 0o600)
}

// Fail has GPUs of a node be faulty: the agent reports them, and the kubelet shows them in pods and counts them no more.
func (k *Kube) Fail(n int, gpus ...int) { k.setFaults(n, gpus, corev1.ResourceHealthStatusUnhealthy) }

// Recover ends that.
func (k *Kube) Recover(n int, gpus ...int) { k.setFaults(n, gpus, corev1.ResourceHealthStatusHealthy) }

func (k *Kube) setFaults(n int, gpus []int, shown corev1.ResourceHealthStatus) {
	k.objects.Lock()
	defer k.objects.Unlock()
	if k.faults[n] == nil {
		k.faults[n] = map[int]bool{}
	}
	for _, g := range gpus {
		k.faults[n][g] = shown == corev1.ResourceHealthStatusUnhealthy
		if p, ok := k.all["pods"].rows[namespace+"/"+workName(n, g)].(*corev1.Pod); ok {
			p = p.DeepCopy()
			p.Status.ContainerStatuses[0].AllocatedResourcesStatus[0].Resources[0].Health = shown
			k.put("pods", p)
		}
	}
	k.report(n)
}

// report writes what the agent and the kubelet report of a node.
func (k *Kube) report(n int) {
	r := faultreport.Report{At: time.Now(), Faults: []faultreport.Fault{}, Devices: map[string]int{gpuResource: GPUs}}
	for g := range GPUs {
		if !k.faults[n][g] {
			continue
		}
		f := faultreport.Fault{
			GPU: gpu.DeviceID(gpuID(n, g)), State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Since: time.Now().Add(-time.Second), HoldersKnown: true,
		}
		if k.all["pods"].rows[namespace+"/"+workName(n, g)] != nil {
			f.Holders = []string{workID(n, g)}
		}
		r.Faults = append(r.Faults, f)
		r.Devices[gpuResource]--
	}
	text, err := faultreport.Encode(r)
	if err != nil {
		panic(err) // of constants
	}
	o := k.all["nodes"].rows["/"+nodeName(n)].(*corev1.Node).DeepCopy()
	o.Annotations[faultreport.Annotation] = text
	o.Status.Allocatable[gpuResource] = *resource.NewQuantity(int64(r.Devices[gpuResource]), resource.DecimalSI)
	k.put("nodes", o)
}

// beat has each kubelet send the status of its node.
func (k *Kube) beat(ctx context.Context) {
	tick := time.NewTicker(heartbeat / time.Duration(k.nodes))
	defer tick.Stop()
	for n := 0; ; n = (n + 1) % k.nodes {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		k.objects.Lock()
		o := k.all["nodes"].rows["/"+nodeName(n)].(*corev1.Node).DeepCopy()
		for i := range o.Status.Conditions {
			o.Status.Conditions[i].LastHeartbeatTime = metav1.Now()
		}
		k.put("nodes", o)
		k.objects.Unlock()
	}
}

// renew has the agents write the reports that have faults again.
func (k *Kube) renew(ctx context.Context) {
	tick := time.NewTicker(faultreport.Renewed)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		k.objects.Lock()
		for n := range k.faults {
			if slices.Contains(slices.Collect(maps.Values(k.faults[n])), true) {
				k.report(n)
			}
		}
		k.objects.Unlock()
	}
}

// put stores an object, and tells the watches. The caller has locked the objects.
func (k *Kube) put(plural string, o object) {
	k.version++
	o.SetResourceVersion(strconv.Itoa(k.version))
	c, name, what := k.all[plural], o.GetNamespace()+"/"+o.GetName(), apiwatch.Modified
	if c.rows[name] == nil {
		c.names, what = append(c.names, name), apiwatch.Added
	}
	c.rows[name] = o
	c.tell(what, o)
}

// remove removes an object.
func (k *Kube) remove(plural string, o object) {
	k.version++
	o.SetResourceVersion(strconv.Itoa(k.version))
	c := k.all[plural]
	delete(c.rows, o.GetNamespace()+"/"+o.GetName())
	c.tell(apiwatch.Deleted, o)
}

func (c *collection) tell(what apiwatch.EventType, o runtime.Object) {
	if len(c.watchers) == 0 {
		return
	}
	event := encodeEvent(what, o)
	for w := range c.watchers {
		w.events <- event
	}
}

// in are the objects of a namespace and of a field selector by node, in order, without those in front of one.
func (c *collection) in(r *http.Request, space string, limit int) (all []runtime.Object, more int) {
	node, byNode := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "spec.nodeName=")
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	for i, name := range c.names[from:] {
		o := c.rows[name]
		if p, ok := o.(*corev1.Pod); o == nil || space != "" && o.GetNamespace() != space || byNode && ok && p.Spec.NodeName != node {
			continue
		}
		if limit > 0 && len(all) == limit {
			return all, from + i
		}
		all = append(all, o)
	}
	return all, 0
}

var (
	serializer, _ = runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), protobuf)
	decoder       = scheme.Codecs.UniversalDeserializer()
)

// encode encodes an object with its kind.
func encode(o runtime.Object) []byte {
	kinds, _, err := scheme.Scheme.ObjectKinds(o)
	if err != nil {
		panic(err) // not one of the Kubernetes API
	}
	o.GetObjectKind().SetGroupVersionKind(kinds[0])
	var out bytes.Buffer
	if err := serializer.Serializer.Encode(o, &out); err != nil {
		panic(err)
	}
	return out.Bytes()
}

func encodeEvent(what apiwatch.EventType, o runtime.Object) []byte {
	var out bytes.Buffer
	frames := serializer.StreamSerializer.NewFrameWriter(&out)
	event := &metav1.WatchEvent{Type: string(what), Object: runtime.RawExtension{Raw: encode(o)}}
	if err := serializer.StreamSerializer.Encode(event, frames); err != nil {
		panic(err)
	}
	return out.Bytes()
}

func write(w http.ResponseWriter, status int, o runtime.Object) {
	w.Header().Set("Content-Type", protobuf)
	w.WriteHeader(status)
	_, _ = w.Write(encode(o))
}

func refuse(w http.ResponseWriter, status int32, reason metav1.StatusReason) {
	write(w, int(status), &metav1.Status{Status: metav1.StatusFailure, Code: status, Reason: reason, Message: string(reason)})
}

// path is what a request is about: its resource and, where it has them, namespace, name and subresource.
type path struct{ space, plural, name, sub string }

// pathOf reads /api/v1/..., /apis/GROUP/VERSION/....
func pathOf(r *http.Request) path {
	all := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	all = all[min(len(all), map[string]int{"api": 2, "apis": 3}[all[0]]):]
	var p path
	if len(all) > 2 && all[0] == "namespaces" {
		p.space, all = all[1], all[2:]
	}
	all = append(all, "", "", "")
	p.plural, p.name, p.sub = all[0], all[1], all[2]
	return p
}

// requestName is what a request is counted as.
func requestName(r *http.Request) string {
	p := pathOf(r)
	verb := map[string]string{http.MethodPost: "create", http.MethodPut: "update", http.MethodGet: "get"}[r.Method]
	switch {
	case p.plural == "":
		return "discovery"
	case r.URL.Query().Get("watch") != "":
		verb = "watch"
	case r.Method == http.MethodGet && p.name == "" && r.URL.Query().Get("limit") == "1":
		verb = "list one of"
	case r.Method == http.MethodGet && p.name == "":
		verb = "list"
	}
	return strings.TrimSuffix(verb+" "+p.plural+"/"+p.sub, "/")
}

func (k *Kube) serve(w http.ResponseWriter, r *http.Request) {
	p := pathOf(r)
	switch {
	case p.plural == "":
		k.discover(w)
	case p.plural == "selfsubjectaccessreviews":
		write(w, http.StatusCreated, &authorizationv1.SelfSubjectAccessReview{Status: authorizationv1.SubjectAccessReviewStatus{Allowed: true}})
	case k.all[p.plural] == nil:
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	case p.sub == "eviction":
		k.evict(w, p)
	case r.Method == http.MethodPost, r.Method == http.MethodPut:
		k.change(w, r, p)
	case r.URL.Query().Get("watch") != "":
		k.watch(w, r, p)
	default:
		k.read(w, r, p)
	}
}

// discover has the cluster have the API of Dynamic Resource Allocation, as all have it.
func (k *Kube) discover(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"resource.k8s.io/v1","resources":[]}`)
}

func (k *Kube) read(w http.ResponseWriter, r *http.Request, p path) {
	k.objects.Lock()
	defer k.objects.Unlock()
	c := k.all[p.plural]
	if p.name != "" {
		if o := c.rows[p.space+"/"+p.name]; o != nil {
			write(w, http.StatusOK, o)
			return
		}
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		return
	}
	limit, _ := strconv.Atoi(r.URL.Query().Get("limit"))
	items, more := c.in(r, p.space, limit)
	list := c.list()
	of, err := meta.ListAccessor(list)
	if err == nil {
		of.SetResourceVersion(strconv.Itoa(k.version))
		if more > 0 {
			of.SetContinue(strconv.Itoa(more))
		}
		err = meta.SetList(list, items)
	}
	if err != nil {
		panic(err) // list is one of NewKube
	}
	write(w, http.StatusOK, list)
}

// watch sends the objects first if the client asks for that, and then all changes.
func (k *Kube) watch(w http.ResponseWriter, r *http.Request, p path) {
	seconds, _ := strconv.Atoi(r.URL.Query().Get("timeoutSeconds"))
	end, beat := time.After(time.Duration(max(seconds, 60))*time.Second), time.NewTicker(bookmarks)
	defer beat.Stop()
	w.Header().Set("Content-Type", protobuf+";stream=watch")
	flush := http.NewResponseController(w).Flush
	k.objects.Lock()
	c, me := k.all[p.plural], &watcher{events: make(chan []byte, 4*GPUs*k.nodes+100)}
	var first []runtime.Object
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		first, _ = c.in(r, p.space, 0)
	}
	c.watchers[me] = true
	for _, o := range first {
		_, _ = w.Write(encodeEvent(apiwatch.Added, o))
	}
	if r.URL.Query().Get("sendInitialEvents") == "true" {
		_, _ = w.Write(k.bookmark(c, map[string]string{metav1.InitialEventsAnnotationKey: "true"}))
	}
	k.objects.Unlock()
	defer func() {
		k.objects.Lock()
		delete(c.watchers, me)
		k.objects.Unlock()
	}()
	for flush() == nil {
		select {
		case event := <-me.events:
			_, _ = w.Write(event)
		case <-beat.C:
			k.objects.Lock()
			event := k.bookmark(c, nil)
			k.objects.Unlock()
			_, _ = w.Write(event)
		case <-end:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// bookmark is an event without an object but its version.
func (k *Kube) bookmark(c *collection, annotations map[string]string) []byte {
	kind := map[*collection]object{
		k.all["nodes"]: &corev1.Node{}, k.all["pods"]: &corev1.Pod{}, k.all["jobs"]: &batchv1.Job{}, k.all["resourceclaims"]: &resourcev1.ResourceClaim{},
		k.all["persistentvolumeclaims"]: &corev1.PersistentVolumeClaim{}, k.all["persistentvolumes"]: &corev1.PersistentVolume{},
		k.all["resourceslices"]: &resourcev1.ResourceSlice{}, k.all["deviceclasses"]: &resourcev1.DeviceClass{},
	}[c]
	kind.SetResourceVersion(strconv.Itoa(k.version))
	kind.SetAnnotations(annotations)
	return encodeEvent(apiwatch.Bookmark, kind)
}

// change creates or replaces a ConfigMap or a Lease.
func (k *Kube) change(w http.ResponseWriter, r *http.Request, p path) {
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	decoded, _, err := decoder.Decode(text, nil, nil)
	o, ok := decoded.(object)
	if err != nil || !ok {
		refuse(w, http.StatusBadRequest, metav1.StatusReasonBadRequest)
		return
	}
	o.SetNamespace(p.space)
	k.objects.Lock()
	defer k.objects.Unlock()
	is := k.all[p.plural].rows[p.space+"/"+o.GetName()]
	switch {
	case r.Method == http.MethodPost && is != nil:
		refuse(w, http.StatusConflict, metav1.StatusReasonAlreadyExists)
	case r.Method == http.MethodPut && is == nil:
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	case r.Method == http.MethodPut && is.GetResourceVersion() != o.GetResourceVersion():
		refuse(w, http.StatusConflict, metav1.StatusReasonConflict)
	default:
		k.put(p.plural, o)
		write(w, http.StatusOK, o)
	}
}

// evict has a pod end, and another one run on the free node in its place.
func (k *Kube) evict(w http.ResponseWriter, p path) {
	k.objects.Lock()
	defer k.objects.Unlock()
	is, ok := k.all["pods"].rows[p.space+"/"+p.name].(*corev1.Pod)
	if !ok {
		refuse(w, http.StatusNotFound, metav1.StatusReasonNotFound)
		return
	}
	k.acted()
	gone := is.DeepCopy()
	gone.DeletionTimestamp = &metav1.Time{Time: time.Now()}
	k.put("pods", gone)
	time.AfterFunc(endsAfter, func() {
		k.objects.Lock()
		defer k.objects.Unlock()
		k.remove("pods", gone.DeepCopy())
		next := gone.DeepCopy()
		moved := len(k.Acts()) - 1
		next.Name, next.UID, next.DeletionTimestamp = workName(k.nodes-1, moved%GPUs), types.UID(workID(k.nodes-1, moved%GPUs)), nil
		next.Spec.NodeName = nodeName(k.nodes - 1)
		next.Status = newPod(k.nodes-1, moved%GPUs).Status
		k.put("pods", next)
	})
	write(w, http.StatusCreated, &metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated})
}
