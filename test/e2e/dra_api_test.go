//go:build e2e

package e2e

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// serviceAddress is that of the service "kubernetes", which pods have in their variables.
const serviceAddress = "10.96.0.1"

// serveServiceAddress passes the connections of pods on to the API server, in place of kube-proxy.
func serveServiceAddress(t *testing.T) {
	t.Helper()
	must(t, "ip", "address", "add", serviceAddress+"/32", "dev", "lo")
	l, err := net.Listen("tcp", serviceAddress+":443")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			go pass(from, firstAddress+":6443")
		}
	}()
}

// pass connects two ends until one of them closes.
func pass(from net.Conn, address string) {
	defer func() { _ = from.Close() }()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer func() { _ = to.Close() }()
	go func() {
		_, _ = io.Copy(to, from)
		_ = to.Close()
	}()
	_, _ = io.Copy(from, to)
}

// stopAPI ends the API server. What it has stored stays.
func (c *cluster) stopAPI(t *testing.T) {
	t.Helper()
	c.api.stop(t, syscall.SIGKILL)
}

// startAPI starts the API server again, and anew the programs that with the election of a leader would have ended without it. They would look
// for it again after a minute.
func (c *cluster) startAPI(t *testing.T) {
	t.Helper()
	c.api = c.serve()
	await(t, "the API server", 60*time.Second, func() error {
		return errors.Join(try("kubectl", "get", "--raw", "/readyz"), c.api.alive())
	})
	for _, p := range c.control {
		p.stop(t, syscall.SIGKILL)
	}
	c.control = c.controllers()
}

// draDriver is the name of the agent's DRA driver.
const draDriver = "gpu.nvidia.com"

// resourceSlices returns those of a driver on the cluster, in order of their names.
func resourceSlices(driver string) ([]kubeapi.ResourceSlice, error) {
	var list struct{ Items []kubeapi.ResourceSlice }
	err := fetchJSON(kubeAPI+"/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver="+driver, &list)
	return list.Items, err
}

// published returns the devices that the agent of the node has in slices, by their names. Two of one name are an error.
func (n *kubeNode) published() (map[string]kubeapi.Device, error) {
	all, err := resourceSlices(draDriver)
	if err != nil {
		return nil, err
	}
	devices := map[string]kubeapi.Device{}
	for _, s := range all {
		if s.Spec.NodeName != n.name {
			continue
		}
		for _, d := range s.Spec.Devices {
			if _, twice := devices[d.Name]; twice {
				err = errors.Join(err, errors.New("two devices "+d.Name))
			}
			devices[d.Name] = d
		}
	}
	return devices, err
}

// deviceName is the name of a device in a slice.
func deviceName(uuid string) string { return strings.ToLower(uuid) }
