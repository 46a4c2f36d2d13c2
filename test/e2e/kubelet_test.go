//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
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

func (c *cluster) startKubelet() {
	c.kubelet = start(c.owner, "kubelet", nil, "kubelet", "--config=kubelet.yaml", "--kubeconfig=kubeconfig.yaml",
		"--hostname-override="+nodeName, "--node-ip="+nodeAddress, "--v=2")
}

// restartKubelet ends kubelet by the signal, starts it anew and waits until the plugin has registered with
// the new one and the node offers all eight GPUs.
func (c *cluster) restartKubelet(t *testing.T, signal syscall.Signal) {
	t.Helper()
	c.kubelet.stop(t, signal)
	c.startKubelet()
	c.awaitRegistration(t, 0, 8)
}

// killPlugin kills k8s-gpu and waits until kubelet has started another one, that has registered, and this many GPUs are
// allocatable.
func (c *cluster) killPlugin(t *testing.T, allocatable int) {
	t.Helper()
	before, err := c.registrations()
	if err != nil {
		t.Fatal(err)
	}
	c.killAgent(t)
	c.awaitRegistration(t, before, allocatable)
}

func (c *cluster) killAgent(t *testing.T) {
	t.Helper()
	for pid := range running("k8s-gpu") {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitRegistration waits until kubelet counts more registrations than before, and of the eight GPUs this
// many are allocatable.
func (c *cluster) awaitRegistration(t *testing.T, before, allocatable int) {
	t.Helper()
	await(t, "the plugin to register", 60*time.Second, func() error {
		count, err := c.registrations()
		if err == nil && count <= before {
			err = fmt.Errorf("kubelet counts %d registrations, as before", count)
		}
		return errors.Join(err, c.kubelet.alive())
	})
	c.awaitGPUs(t, 8, allocatable)
}

// registrations returns kubelet's own count, which starts at nothing in every kubelet process.
func (c *cluster) registrations() (int, error) {
	metrics, err := fetch("http://" + nodeAddress + ":10255/metrics")
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
func (c *cluster) healthy(resource string) (ids []string, err error) {
	err = askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
		answer, err := kubelet.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
		ids = idsOf(resource, answer.GetDevices())
		return err
	})
	return ids, err
}

// held returns the GPUs that kubelet holds for each pod in the namespace default, in order.
func (c *cluster) held() (map[string][]string, error) {
	pods := map[string][]string{}
	err := askKubelet(func(ctx context.Context, kubelet podresources.PodResourcesListerClient) error {
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
func askKubelet(ask func(context.Context, podresources.PodResourcesListerClient) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+resources, grpc.WithTransportCredentials(insecure.NewCredentials()))
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
func (c *cluster) awaitOneSocket(t *testing.T) {
	t.Helper()
	await(t, "one socket of the plugin", 30*time.Second, func() error {
		sockets, err := filepath.Glob(pluginFolder + "/*.sock")
		sockets = slices.DeleteFunc(sockets, func(s string) bool { return s == registration })
		if err == nil && len(sockets) != 1 {
			err = fmt.Errorf("the sockets are %q", sockets)
		}
		for _, socket := range sockets {
			err = errors.Join(err, dial(socket))
		}
		return err
	})
}

// tasks returns the process id and the state of every container that containerd runs, by the container's id.
func (c *cluster) tasks() (map[string]string, error) {
	text, err := c.ctr("tasks", "list")
	tasks := map[string]string{}
	for line := range strings.Lines(text) {
		if id, state, found := strings.Cut(strings.Join(strings.Fields(line), " "), " "); found {
			tasks[id] = state
		}
	}
	return tasks, err
}
