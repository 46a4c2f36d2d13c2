package kubelet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/cdi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// DRA are the settings of the API dra that its checks need.
type DRA struct {
	Node       string // name of the Node object
	Driver     string // name of the DRA driver
	Sockets    string // begins the names of the agent's own sockets in the kubelet's folder of registrations
	Slices     string // begins the names of the agent's own ResourceSlices
	KubeletDir string // the kubelet's --root-dir
	CDIDir     string // folder of the CDI specifications
	API        kubeapi.Options
	Names      []string // extended resources of the agent's pools: "nvidia.com/gpu"
}

const (
	draCheck = "dra"
	apiCheck = "kubernetes api"
)

// Checks are the checks of the API dra.
func (o DRA) Checks() []doctor.Check {
	return []doctor.Check{
		{Name: draCheck, Place: o.registrations(), Look: o.registration},
		{Name: apiCheck, Place: o.API.Address, Look: o.api},
	}
}

// registrations is the folder in which the kubelet looks for the sockets of drivers (kubelet_getters.go: getPluginsRegistrationDir).
func (o DRA) registrations() string { return filepath.Join(o.KubeletDir, "plugins_registry") }

// registration checks the kubelet's folder and searches other drivers of the same name.
func (o DRA) registration(ctx context.Context, f *doctor.Facts) []doctor.Finding {
	folder := o.registrations()
	problem := func(place, found, remedy string) []doctor.Finding {
		return []doctor.Finding{finding(draCheck, doctor.Problem, place, found, remedy)}
	}
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		return problem(folder, "the kubelet's folder for the registration of drivers does not exist here",
			"on a node: does the kubelet have another --root-dir? Set --kubelet-dir. In a pod: mount the host's "+folder+" (hostPath) at the same path")
	}
	if unix.Access(folder, unix.W_OK|unix.X_OK) != nil {
		return problem(folder, fmt.Sprintf("user %d can't write there, so the agent can't make its socket", f.UID), "run the agent as root, and mount the folder without readOnly")
	}
	paths, _ := filepath.Glob(filepath.Join(folder, o.Driver+"*.sock"))
	own := 0
	for _, path := range paths {
		switch answers := dial(ctx, path) == nil; {
		case strings.HasPrefix(filepath.Base(path), o.Sockets):
			if answers {
				own++
			}
		case answers:
			return problem(path, "another DRA driver "+o.Driver+" is registered on this node: the kubelet calls the one that registered last, and both write ResourceSlices",
				"drain the node and remove one of them: kubectl get daemonset -A | grep -i dra")
		}
	}
	if own == 0 && f.Agent.Running {
		return []doctor.Finding{finding(draCheck, doctor.Warning, folder, "the running agent has no socket of the driver "+o.Driver+" here",
			"does the agent run with --api dra and this --kubelet-dir? See its log for \"registration\"")}
	}
	return []doctor.Finding{finding(draCheck, doctor.OK, folder, report.Noun(own, "socket")+" of this agent", "")}
}

// api checks what the agent needs of Kubernetes' API: credentials, the Node, its rights, the slices.
func (o DRA) api(ctx context.Context, f *doctor.Facts) []doctor.Finding {
	client, err := kubeapi.New(o.API)
	if err != nil {
		return []doctor.Finding{finding(apiCheck, doctor.Problem, "--kube-api", err.Error(), "set --kube-api, --kube-token-file and --kube-ca-file, or run doctor in the agent's pod")}
	}
	var all []doctor.Finding
	add := func(s doctor.Severity, found, remedy string) {
		all = append(all, finding(apiCheck, s, client.Server(), found, remedy))
	}
	node, err := client.Node(ctx, o.Node)
	switch {
	case errors.Is(err, kubeapi.ErrNotFound):
		add(doctor.Problem, fmt.Sprintf("there is no Node %q: slices need one as their owner", o.Node), "set --node-name to the name that kubectl get nodes shows, or NODE_NAME from spec.nodeName")
		return all
	case errors.Is(err, kubeapi.ErrForbidden), errors.Is(err, kubeapi.ErrUnauthorized):
		add(doctor.Problem, err.Error(), "apply the agent's RBAC (deploy/dra), or run doctor in the agent's pod, with its token")
		return all
	case err != nil:
		add(doctor.Problem, "no answer: "+err.Error(), "the kubelet must reach the same server: journalctl -u kubelet; with a network policy allow egress of the agent's pod")
		return all
	}
	for _, found := range [][]doctor.Finding{o.versions(client, node), o.rights(ctx, client), o.leftovers(ctx, client), o.names(ctx, client, node)} {
		all = append(all, found...)
	}
	if len(all) == 0 {
		add(doctor.OK, "Node "+o.Node+", slices can be written", "")
	}
	return all
}

// versions checks the kubelet and the container runtime of a node.
func (o DRA) versions(client *kubeapi.Client, node kubeapi.Node) (all []doctor.Finding) {
	info := node.Status.NodeInfo
	if minor, ok := minorVersion(info.KubeletVersion); ok && minor < 34 {
		all = append(all, finding(apiCheck, doctor.Problem, client.Server(), "the kubelet is "+info.KubeletVersion+": resource.k8s.io/v1 needs Kubernetes 1.34", "upgrade the node, or use --api device-plugin"))
	}
	if why := cdi.ParseRuntime(info.ContainerRuntimeVersion).Unsupported(o.CDIDir); why != "" {
		all = append(all, finding(runtimeCheck, doctor.Problem, "status.nodeInfo of Node "+o.Node, "containers would get no GPU: "+why, "upgrade the container runtime, or use --api device-plugin"))
	}
	return all
}

// minorVersion is 34 of "v1.34.2+k3s1".
func minorVersion(version string) (int, bool) {
	rest, ok := strings.CutPrefix(version, "v1.")
	if !ok {
		return 0, false
	}
	minor, _, _ := strings.Cut(rest, ".")
	n, err := strconv.Atoi(minor)
	return n, err == nil
}

// rights writes a slice as the agent does, without storing it: RBAC and admission policies decide as for a real one.
func (o DRA) rights(ctx context.Context, client *kubeapi.Client) []doctor.Finding {
	slice := kubeapi.ResourceSlice{
		Metadata: kubeapi.ObjectMeta{Name: o.Slices + "0-doctor"},
		Spec: kubeapi.ResourceSliceSpec{
			Driver: o.Driver, NodeName: o.Node, Pool: kubeapi.ResourcePool{Name: o.Node, Generation: 1, ResourceSliceCount: 1},
		},
	}
	if _, err := client.CreateSlice(ctx, slice, kubeapi.DryRun); err != nil {
		return []doctor.Finding{finding(apiCheck, doctor.Problem, client.Server(), "this agent can't write ResourceSlices: "+err.Error(),
			"apply the agent's RBAC and admission policy (deploy/dra); doctor uses the token of "+o.tokenPlace())}
	}
	return nil
}

func (o DRA) tokenPlace() string {
	if o.API.TokenFile != "" {
		return o.API.TokenFile
	}
	return "this pod's service account"
}

// leftovers searches slices of another driver of the same name.
func (o DRA) leftovers(ctx context.Context, client *kubeapi.Client) []doctor.Finding {
	list, err := client.Slices(ctx, kubeapi.SliceSelector{Node: o.Node, Driver: o.Driver})
	if err != nil {
		return []doctor.Finding{finding(apiCheck, doctor.Problem, client.Server(), err.Error(), "apply the agent's RBAC (deploy/dra)")}
	}
	for _, s := range list.Items {
		if name := s.Metadata.Name; !strings.HasPrefix(name, o.Slices) {
			return []doctor.Finding{finding(apiCheck, doctor.Warning, "resourceslice "+name, "another DRA driver of this name has published devices of this node",
				"if that driver is gone, the agent deletes the slice; if it comes back, both run: kubectl get daemonset -A | grep -i dra")}
		}
	}
	return nil
}

// names checks the DeviceClasses, and that no extended resource is offered by a device plugin, too.
func (o DRA) names(ctx context.Context, client *kubeapi.Client, node kubeapi.Node) (all []doctor.Finding) {
	classes, err := client.Classes(ctx)
	mapped := map[string]string{} // class by extended resource
	for _, c := range classes {
		mapped[c.Spec.ExtendedResourceName] = c.Metadata.Name
	}
	switch {
	case errors.Is(err, kubeapi.ErrForbidden):
		mapped[kubeadapter.GPUResource] = o.Driver // as in the manifests
	case err != nil:
		return []doctor.Finding{finding(apiCheck, doctor.Warning, client.Server(), err.Error(), "try again")}
	case !slices.ContainsFunc(classes, func(c kubeapi.DeviceClass) bool { return c.Metadata.Name == o.Driver }):
		all = append(all, finding(apiCheck, doctor.Problem, "deviceclass "+o.Driver, "the DeviceClass does not exist: no claim can name it",
			"k8s-gpu classes | kubectl apply -f -"))
	}
	for _, name := range o.Names {
		class, ok := mapped[name]
		if n := node.Status.Allocatable[name]; ok && n != "" && n != "0" {
			all = append(all, finding(apiCheck, doctor.Problem, "Node "+o.Node, fmt.Sprintf("a device plugin offers %s of %s, which DeviceClass %s maps, too: one GPU may be given to two pods", n, name, class),
				"kubectl get daemonset -A | grep -i device-plugin; GPUs that the agent itself still offers through device plugins: k8s-gpu migrate plan"))
		}
	}
	return all
}
