// Package kubelet has the checks of doctor that are about the kubelet and its container runtime.
package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// Options are the settings of the agent that the checks need.
type Options struct {
	KubeletSocket, PodResourcesSocket string // "" = not used
	CRISocket                         string // "" = the usual ones are tried
	CDIOnly                           bool   // containers get their devices by CDI names of the CRI, and in no other way
}

// Checks are the checks.
func Checks(o Options) []doctor.Check {
	return []doctor.Check{
		{Name: "kubelet", Place: o.KubeletSocket, Look: o.kubelet},
		{Name: "pod resources", Place: o.PodResourcesSocket, Look: o.podResources},
		{Name: "container runtime", Place: "CRI socket", Look: o.runtime},
	}
}

func finding(check string, s doctor.Severity, place, found, remedy string) doctor.Finding {
	return doctor.Finding{Check: check, Severity: s, Place: place, Found: found, Remedy: remedy}
}

// kubelet checks the folder and the socket in which plugins register, and that no other plugin has the resources.
func (o Options) kubelet(ctx context.Context, f *doctor.Facts) []doctor.Finding {
	problem := func(place, found, remedy string) []doctor.Finding {
		return []doctor.Finding{finding("kubelet", doctor.Problem, place, found, remedy)}
	}
	if o.KubeletSocket == "" {
		return []doctor.Finding{finding("kubelet", doctor.Note, "--kubelet-socket", "--kubelet-socket is empty: the agent registers with no kubelet", "")}
	}
	folder := filepath.Dir(o.KubeletSocket)
	info, err := os.Stat(folder)
	switch {
	case err != nil || !info.IsDir():
		return problem(folder, "the kubelet's folder of device plugins does not exist here",
			"on a node: is the kubelet installed? In a pod: mount the host's "+folder+" (hostPath) at the same path")
	case unix.Access(folder, unix.W_OK|unix.X_OK) != nil:
		return problem(folder, fmt.Sprintf("user %d can't write there, so the agent can't make its socket", f.UID), "run the agent as root, and mount the folder without readOnly")
	}
	if _, err := os.Stat(o.KubeletSocket); err != nil {
		return problem(o.KubeletSocket, "kubelet.sock does not exist: the kubelet does not run, or this folder is not the kubelet's",
			"systemctl status kubelet; the kubelet has it in /var/lib/kubelet/device-plugins, whatever its --root-dir is")
	}
	if err := dial(ctx, o.KubeletSocket); errors.Is(err, syscall.ECONNREFUSED) {
		return problem(o.KubeletSocket, "no process serves kubelet.sock: the kubelet has ended, or serves another folder", "systemctl status kubelet; journalctl -u kubelet")
	} else if err != nil {
		return problem(o.KubeletSocket, "no connection to kubelet.sock: "+err.Error(), "run doctor as root; with SELinux: ausearch -m avc")
	}
	if found := o.otherPlugins(ctx, f, folder); found != nil {
		return found
	}
	if found := readCheckpoint(f, folder); found != nil {
		return found
	}
	return []doctor.Finding{finding("kubelet", doctor.OK, o.KubeletSocket, "accepts connections", "")}
}

// nvidiaSockets begins the names of the sockets of NVIDIA's plugin (server.go: nvidia-<resource>.sock).
const nvidiaSockets = "nvidia-"

// otherPlugins searches the sockets of NVIDIA's plugin.
func (o Options) otherPlugins(ctx context.Context, f *doctor.Facts, folder string) []doctor.Finding {
	paths, _ := filepath.Glob(filepath.Join(folder, nvidiaSockets+"*.sock"))
	for _, path := range paths {
		if dial(ctx, path) == nil {
			found := "another plugin, NVIDIA's by the name of its socket, serves the same resources: the kubelet uses the one that registered last"
			if p := f.Running("nvidia-device-plugin"); len(p) > 0 {
				found = fmt.Sprintf("nvidia-device-plugin (process %d) serves the same resources: the kubelet uses the one that registered last", p[0].PID)
			}
			return []doctor.Finding{finding("kubelet", doctor.Problem, path, found,
				"remove one of them: kubectl get daemonset -A | grep -i nvidia; with the GPU operator: devicePlugin.enabled=false")}
		}
	}
	return nil
}

// checkpointName is the kubelet's file (pkg/kubelet/cm/devicemanager/types.go: kubeletDeviceManagerCheckpoint).
const checkpointName = "kubelet_internal_checkpoint"

// readCheckpoint reads which devices the kubelet has registered.
func readCheckpoint(f *doctor.Facts, folder string) []doctor.Finding {
	path := filepath.Join(folder, checkpointName)
	text, err := os.ReadFile(path)
	if err != nil {
		return nil // the kubelet writes it at the first registration
	}
	var c struct {
		Data struct {
			RegisteredDevices map[string][]string
		}
	}
	if err := json.Unmarshal(text, &c); err != nil {
		return []doctor.Finding{finding("kubelet", doctor.Problem, path, checkpointName+" is not valid ("+err.Error()+"): the kubelet does not start with it, or has lost which pod has which device",
			"drain the node, stop the kubelet, remove the file, start the kubelet")}
	}
	return foreignDevices(f, path, c.Data.RegisteredDevices)
}

// foreignDevices compares the device IDs that the kubelet has for a resource with those that the agent offers.
func foreignDevices(f *doctor.Facts, place string, registered map[string][]string) []doctor.Finding {
	if !f.Agent.Running {
		return nil // the kubelet may have those of an earlier plugin
	}
	for resource, ids := range registered {
		pool, ok := strings.CutPrefix(resource, inventory.ResourceDomain)
		offered := slices.DeleteFunc(slices.Clone(f.Agent.Report.Devices), func(d report.Device) bool { return d.Pool != pool })
		if !ok || len(offered) == 0 || len(ids) == 0 {
			continue
		}
		own := slices.ContainsFunc(ids, func(id string) bool {
			uuid, _, _ := strings.Cut(id, "::")
			return slices.ContainsFunc(offered, func(d report.Device) bool { return string(d.ID) == uuid })
		})
		if !own {
			return []doctor.Finding{finding("kubelet", doctor.Problem, place, fmt.Sprintf("%s has devices of another plugin: %s", resource, ids[0]), "remove the other plugin: kubectl get daemonset -A")}
		}
	}
	return nil
}

// podResources checks the API by which the agent learns which pods hold which devices.
func (o Options) podResources(ctx context.Context, f *doctor.Facts) []doctor.Finding {
	const check = "pod resources"
	if o.PodResourcesSocket == "" {
		return []doctor.Finding{finding(check, doctor.Note, "--pod-resources-socket", "--pod-resources-socket is empty: which pods hold which devices is not known", "")}
	}
	if o.KubeletSocket != "" && dial(ctx, o.KubeletSocket) != nil {
		return []doctor.Finding{finding(check, doctor.Skipped, "kubelet", "not checked: see kubelet", "")}
	}
	allocatable, err := podresources.Allocatable(ctx, o.PodResourcesSocket) // unlike List it changes nothing in the kubelet
	switch {
	case errors.Is(err, podresources.ErrNoDirectory):
		return []doctor.Finding{finding(check, doctor.Warning, filepath.Dir(o.PodResourcesSocket), "the folder of the pod-resources API does not exist here: which pods hold which devices is not known",
			"mount the host's folder (hostPath) at the same path; with another --root-dir of the kubelet set --pod-resources-socket")}
	case err != nil:
		return []doctor.Finding{finding(check, doctor.Warning, o.PodResourcesSocket, "no answer: "+err.Error(), "systemctl status kubelet; run doctor as root")}
	}
	registered := map[string][]string{}
	for _, d := range allocatable {
		registered[d.Resource] = append(registered[d.Resource], d.ID)
	}
	if found := foreignDevices(f, o.PodResourcesSocket, registered); found != nil {
		return found
	}
	return []doctor.Finding{finding(check, doctor.OK, o.PodResourcesSocket, report.Noun(len(registered), "resource"), "")}
}

// dial reports whether a process accepts connections at a unix socket.
func dial(ctx context.Context, path string) error {
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return err
	}
	return c.Close()
}
