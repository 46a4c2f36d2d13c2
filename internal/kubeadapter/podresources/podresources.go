// Package podresources reads from the kubelet which pods hold which device IDs: the kubelet's pod-resources API, v1.
package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// DefaultSocket is where a kubelet with the default --root-dir serves the API.
const DefaultSocket = "/var/lib/kubelet/pod-resources/kubelet.sock"

// maxAnswer bounds an answer, in bytes: a pod takes some hundred, and gRPC's own limit of 4 MiB is not the kubelet's.
const maxAnswer = 16 << 20

// Answer is what the kubelet says at one moment. It names the pods that the kubelet knows of, which are not all until
// it has heard from the API server, and no init containers but those that run beside the others.
type Answer struct {
	Pods    int       // that the kubelet knows of, with devices or without
	Started time.Time // when the kubelet made its socket, about when it started
	Devices []Device
}

// Device is a device ID that a container of a pod holds.
type Device struct {
	Pod      string // "namespace/name"
	Resource string
	ID       string
	NUMANode int // -1 = none
}

// ErrNoFolder is that not even the socket's folder is there: it is not mounted, or the kubelet has another --root-dir.
var ErrNoFolder = errors.New("no folder of the pod-resources API")

// List asks the kubelet. ctx should have a deadline: whoever listens may never answer.
func List(ctx context.Context, socket string) (Answer, error) {
	info, err := os.Stat(socket)
	if err != nil {
		if _, missing := os.Stat(filepath.Dir(socket)); errors.Is(missing, fs.ErrNotExist) {
			err = fmt.Errorf("%w: %w", ErrNoFolder, missing)
		}
		return Answer{}, err
	}
	// Only this tells in a few words that nobody listens.
	probe, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return Answer{}, err
	}
	_ = probe.Close()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer)))
	if err != nil {
		return Answer{}, err
	}
	defer func() { _ = conn.Close() }()
	r, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return Answer{}, fmt.Errorf("list %s: %s", socket, status.Convert(err).Message())
	}
	return Answer{Pods: len(r.GetPodResources()), Started: info.ModTime(), Devices: devices(r)}, nil
}

// devices are those of an answer, each once. The kubelet lists a device once for each of its NUMA nodes.
func devices(r *podresources.ListPodResourcesResponse) []Device {
	var all []Device
	type key struct{ resource, id string }
	seen := map[key]bool{}
	for _, p := range r.GetPodResources() {
		for _, c := range p.GetContainers() {
			for _, d := range c.GetDevices() {
				for _, id := range d.GetDeviceIds() {
					k := key{d.GetResourceName(), id}
					if seen[k] {
						continue
					}
					seen[k] = true
					all = append(all, Device{
						Pod: p.GetNamespace() + "/" + p.GetName(), Resource: k.resource, ID: id, NUMANode: numaNode(d.GetTopology()),
					})
				}
			}
		}
	}
	return slices.Clip(all)
}

func numaNode(t *podresources.TopologyInfo) int {
	if nodes := t.GetNodes(); len(nodes) > 0 {
		return int(nodes[0].GetID())
	}
	return -1
}
