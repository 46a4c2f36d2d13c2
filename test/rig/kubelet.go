package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// Kubelet is a small kubelet with the agent beside it, as its DaemonSet would run it.
type Kubelet struct {
	*kubelettest.Kubelet
	agent *exec.Cmd
	http  string // address of the agent's HTTP server
	done  chan error
}

// StartKubelet starts a kubelet in dir and a k8s-gpu binary beside it, whose log goes to log.
func StartKubelet(dir, binary string, s Setup, log io.Writer) (*Kubelet, error) {
	address, err := FreeAddress()
	if err != nil {
		return nil, err
	}
	k := &Kubelet{Kubelet: kubelettest.New(filepath.Join(dir, "device-plugins")), http: address}
	if err := k.Start(); err != nil {
		return nil, fmt.Errorf("kubelet: %w", err)
	}
	return k, k.startAgent(binary, s, log)
}

func (k *Kubelet) startAgent(binary string, s Setup, log io.Writer) error {
	args := []string{
		"--kubelet-socket", k.Socket(), "--mig-strategy", "mixed", "--pass-device-specs", "--http-address", k.http,
		"--pod-resources-socket=" + s.PodResources,
	}
	if s.Policy != "" {
		args = append(args, "--config-file", s.Policy)
	}
	args = append(args, Flags(s.settings())...)
	if s.Peer {
		const script = `mkdir -p "$0" && mount --bind "$1" "$0" && exec "$2"`
		binary, args = "unshare", []string{"--mount", "sh", "-c", script, v1beta1.DevicePluginPath, filepath.Dir(k.Socket()), binary}
	}
	k.agent, k.done = s.command(binary, args...), make(chan error, 1)
	k.agent.Stdout, k.agent.Stderr = log, log
	if err := k.agent.Start(); err != nil {
		return fmt.Errorf("k8s-gpu: %w", err)
	}
	go func() { k.done <- k.agent.Wait() }()
	return nil
}

// FreeAddress is a loopback address on which no process listens.
func FreeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String(), nil
}

// View is what the scheduler sees now, by device ID, with the reasons that the agent's HTTP server has.
func (k *Kubelet) View(ctx context.Context) map[string]View {
	seen := KubeletDevices(k.Kubelet)
	for id, reason := range k.reasons(ctx) {
		if v, ok := seen[id]; ok {
			v.Reason = reason
			seen[id] = v
		}
	}
	return seen
}

// reasons are the health of each device, from the agent.
func (k *Kubelet) reasons(ctx context.Context) map[string]string {
	found := map[string]string{}
	var inventory struct {
		Devices []struct{ ID, Health string }
	}
	if err := json.Unmarshal([]byte(k.Page(ctx, "/inventory")), &inventory); err != nil {
		return found
	}
	for _, d := range inventory.Devices {
		found[d.ID] = d.Health
	}
	return found
}

// AwaitView waits until ok holds for what the scheduler sees.
func (k *Kubelet) AwaitView(ctx context.Context, what string, ok func(map[string]View) bool) error {
	return k.Await(ctx, "kubelet: "+what, func() bool { return ok(k.View(ctx)) })
}

// Grant is what a container with the devices would get.
func (k *Kubelet) Grant(ctx context.Context, resource string, ids ...string) (Grant, error) {
	return Allocate(ctx, k.Kubelet, resource, ids...)
}

// Page returns a page of the agent's HTTP server; "" if it does not answer.
func (k *Kubelet) Page(ctx context.Context, path string) string {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+k.http+path, nil)
	if err != nil {
		return ""
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return ""
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(resp.Body) // what came
	return string(text)
}

// Address is that of the agent's HTTP server.
func (k *Kubelet) Address() string { return k.http }

// PID is the agent's process.
func (k *Kubelet) PID() int { return k.agent.Process.Pid }

// End stops the agent as Kubernetes does, and the kubelet after it.
func (k *Kubelet) End() error {
	defer k.Stop()
	if err := k.agent.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-k.done:
		return err
	case <-time.After(5 * time.Second):
		_ = k.agent.Process.Kill()
		return fmt.Errorf("k8s-gpu did not stop: %w", os.ErrDeadlineExceeded)
	}
}
