package podresources_test

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

func TestList(t *testing.T) {
	socket := filepath.Join(coretest.ShortDir(t), "kubelet.sock")
	p, err := kubelettest.ServePodResources(socket)
	check.NoError(t, err)
	defer p.Close()
	p.Hold("default/one", "nvidia.com/gpu", "GPU-1", "GPU-2")
	p.Hold("default/one", "nvidia.com/gpu", "GPU-2") // of another NUMA node
	p.Hold("default/two", "nvidia.com/gpu.shared")
	p.Claim("default/one", "claim-1", "gpu.nvidia.com", "gpu-3", "k8s.gpu.nvidia.com/claim=x-gpu-3")
	got, err := podresources.List(t.Context(), socket)
	check.NoError(t, err)
	want := podresources.Answer{Pods: 3, Names: []string{"default/one", "default/two", "kube-system/agent"}, Devices: []podresources.Device{
		{Pod: "default/one", Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-1"},
		{Pod: "default/one", Container: "main", Resource: "nvidia.com/gpu", ID: "GPU-2"},
	}, Claims: []podresources.Claim{
		{Pod: "default/one", Container: "main", Namespace: "default", Name: "claim-1", Driver: "gpu.nvidia.com", Pool: "node", Device: "gpu-3", CDI: []string{"k8s.gpu.nvidia.com/claim=x-gpu-3"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	p.Fail(errors.New("too many requests"))
	if _, err := podresources.List(t.Context(), socket); err == nil {
		t.Error("no error, although the kubelet returned one")
	}
}

// The errors are distinguished, and none takes longer than the deadline.
func TestListFails(t *testing.T) {
	dir := coretest.ShortDir(t)
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead, Net: "unix"})
	check.NoError(t, err)
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	silent := filepath.Join(dir, "silent.sock") // accepts connections and never answers
	l, err = net.ListenUnix("unix", &net.UnixAddr{Name: silent, Net: "unix"})
	check.NoError(t, err)
	defer func() { _ = l.Close() }()
	for name, c := range map[string]struct {
		socket string
		want   error
	}{
		"no directory": {filepath.Join(dir, "none", "kubelet.sock"), podresources.ErrNoDirectory},
		"no socket":    {filepath.Join(dir, "kubelet.sock"), fs.ErrNotExist},
		"no server":    {dead, syscall.ECONNREFUSED},
		"no answer":    {silent, nil},
	} {
		limit := time.Minute // the others fail before it
		if name == "no answer" {
			limit = 300 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		began := time.Now()
		_, err := podresources.List(ctx, c.socket)
		cancel()
		if err == nil || c.want != nil && !errors.Is(err, c.want) || errors.Is(err, podresources.ErrNoDirectory) != (name == "no directory") {
			t.Errorf("%s: %v", name, err)
		}
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("%s: took %v", name, took)
		}
	}
}

// The error of a node without a kubelet is one line with the setting to look at.
func TestReadNodeWithoutKubelet(t *testing.T) {
	socket := filepath.Join(coretest.ShortDir(t), "kubelet.sock")
	want := "pod-resources API: dial unix " + socket + ": connect: no such file or directory; --pod-resources-socket names the kubelet's"
	if _, err := podresources.ReadNode(t.Context(), socket); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}
