//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	pluginFolder = "/var/lib/kubelet/device-plugins"
	registration = pluginFolder + "/kubelet.sock"
	resources    = "/var/lib/kubelet/pod-resources/kubelet.sock"
)

// restartKubelet ends kubelet by the signal, starts it anew and waits until the plugin has registered with
// the new one and the node offers all eight GPUs.
func (n *kubeNode) restartKubelet(t *testing.T, signal syscall.Signal) {
	t.Helper()
	n.kubelet.stop(t, signal)
	n.startKubelet()
	n.awaitRegistration(t, 0, 8)
}

// age makes the agent take kubelet's list for complete before kubelet is two minutes old, by the time of its socket, which is its age to the agent.
// It waits until kubelet lists the pods, which are all that it will have.
func (n *kubeNode) age(t *testing.T, pods ...string) {
	t.Helper()
	await(t, "kubelet to list "+strings.Join(pods, ", "), 60*time.Second, func() error {
		return n.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
			answer, err := kubelet.List(ctx, &podresources.ListPodResourcesRequest{})
			missing := slices.Clone(pods)
			for _, pod := range answer.GetPodResources() {
				missing = slices.DeleteFunc(missing, func(name string) bool { return name == pod.GetName() })
			}
			if err == nil && len(missing) > 0 {
				err = fmt.Errorf("it lacks %q", missing)
			}
			return err
		})
	})
	long := time.Now().Add(-time.Hour)
	if err := os.Chtimes(n.path(resources), long, long); err != nil {
		t.Fatal(err)
	}
}

// killPlugin kills k8s-gpu and waits until kubelet has started another one, that has registered, and this many GPUs are
// allocatable.
func (n *kubeNode) killPlugin(t *testing.T, allocatable int) {
	t.Helper()
	before, err := n.registrations()
	if err != nil {
		t.Fatal(err)
	}
	n.killAgent(t)
	n.awaitRegistration(t, before, allocatable)
}

// awaitRegistration waits until kubelet counts more registrations than before, and of the eight GPUs this
// many are allocatable.
func (n *kubeNode) awaitRegistration(t *testing.T, before, allocatable int) {
	t.Helper()
	await(t, "the plugin to register", 60*time.Second, func() error {
		count, err := n.registrations()
		if err == nil && count <= before {
			err = fmt.Errorf("kubelet counts %d registrations, as before", count)
		}
		return errors.Join(err, n.kubelet.alive())
	})
	n.awaitGPUs(t, 8, allocatable)
}

// registrations returns kubelet's own count, which starts at nothing in every kubelet process.
func (n *kubeNode) registrations() (int, error) {
	metrics, err := fetch("http://" + n.address + ":10255/metrics")
	if err != nil {
		return 0, err
	}
	counter := `kubelet_device_plugin_registration_total{resource_name="` + gpuResource + `"}`
	line, found := lineWith(metrics, counter)
	if !found {
		return 0, nil
	}
	return strconv.Atoi(strings.TrimSpace(strings.TrimPrefix(line, counter)))
}

// healthy returns the units of a resource that this kubelet got as healthy, in order. Its node status shows the same later.
func (n *kubeNode) healthy(resource string) (ids []string, err error) {
	err = n.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		ids = idsOf(resource, answer.GetDevices())
		return err
	})
	return ids, err
}

// held returns the GPUs that kubelet holds for each pod in the namespace default, in order.
func (n *kubeNode) held() (map[string][]string, error) {
	pods := map[string][]string{}
	err := n.askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.List(ctx, &podresources.ListPodResourcesRequest{})
		for _, pod := range answer.GetPodResources() {
			for _, container := range pod.GetContainers() {
				if ids := idsOf(gpuResource, container.GetDevices()); pod.GetNamespace() == "default" && len(ids) > 0 {
					pods[pod.GetName()] = ids
				}
			}
		}
		return err
	})
	return pods, err
}

func idsOf(resource string, devices []*podresources.ContainerDevices) []string {
	var ids []string
	for _, d := range devices {
		if d.GetResourceName() == resource {
			ids = append(ids, d.GetDeviceIds()...)
		}
	}
	slices.Sort(ids)
	return ids
}

// askKubelet calls kubelet's podresources API on a connection of its own: every kubelet has another socket.
func (n *kubeNode) askKubelet(ask func(context.Context, podresources.PodResourcesListerClient) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+n.path(resources), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	return ask(ctx, podresources.NewPodResourcesListerClient(conn))
}

// dial returns nil if a process listens on a socket.
func dial(socket string) error {
	conn, err := (&net.Dialer{}).DialContext(context.Background(), "unix", socket)
	if err != nil {
		return err
	}
	return conn.Close()
}

// awaitOneSocket waits until the one plugin has one socket in kubelet's folder, which answers, and left no other.
func (n *kubeNode) awaitOneSocket(t *testing.T) {
	t.Helper()
	await(t, "one socket of the plugin", 30*time.Second, func() error {
		sockets, err := filepath.Glob(n.path(pluginFolder) + "/*.sock")
		sockets = slices.DeleteFunc(sockets, func(s string) bool { return s == n.path(registration) })
		if err == nil && len(sockets) != 1 {
			err = fmt.Errorf("the sockets are %q", sockets)
		}
		for _, socket := range sockets {
			err = errors.Join(err, dial(socket))
		}
		return err
	})
}
