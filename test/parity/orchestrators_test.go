package parity

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

// orchestrators are a kubelet and a Nomad client's end of the plugin protocol.
type orchestrators struct {
	kubelet *kubelettest.Kubelet
	nomad   device.DevicePlugin

	mu      sync.Mutex
	groups  []*device.DeviceGroup
	changed chan struct{}
}

// serve offers one source to a kubelet and one to Nomad, over their protocols.
func serve(ctx context.Context, t testing.TB, toKubelet kubeadapter.Source, toNomad nomadadapter.Source, running *sync.WaitGroup) *orchestrators {
	o := &orchestrators{changed: make(chan struct{})}
	o.serveKubelet(ctx, t, toKubelet, running)
	o.serveNomad(ctx, t, toNomad)
	return o
}

func (o *orchestrators) serveKubelet(ctx context.Context, t testing.TB, src kubeadapter.Source, running *sync.WaitGroup) {
	dir, err := os.MkdirTemp("", "parity") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	o.kubelet = kubelettest.New(dir)
	if err := o.kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { o.kubelet.Stop(); _ = os.RemoveAll(dir) })
	adapter := kubeadapter.New(src, kubeadapter.Options{KubeletSocket: o.kubelet.Socket(), MPSRoot: "/run/nvidia/mps"})
	running.Go(func() { _ = adapter.Run(ctx) })
}

func (o *orchestrators) serveNomad(ctx context.Context, t testing.TB, src nomadadapter.Source) {
	source := func(context.Context, nomadadapter.Settings, *slog.Logger) nomadadapter.Source { return src }
	o.nomad = nomadtest.Serve(t, nomadadapter.New(ctx, "2.0.0", source, hclog.NewNullLogger()))
	stream, err := o.nomad.Fingerprint(ctx)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for r := range stream {
			o.mu.Lock()
			o.groups = r.Devices
			close(o.changed)
			o.changed = make(chan struct{})
			o.mu.Unlock()
		}
	}()
}

// nomadHealth is each device's health by Nomad's stream.
func (o *orchestrators) nomadHealth() map[string]bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	health := map[string]bool{}
	for _, g := range o.groups {
		for _, d := range g.Devices {
			health[d.ID] = d.Healthy
		}
	}
	return health
}

// kubeletHealth is each device's health by kubelet's streams, and its resource.
func (o *orchestrators) kubeletHealth() (health map[string]bool, resource map[string]string) {
	health, resource = map[string]bool{}, map[string]string{}
	for _, r := range o.kubelet.Registrations() {
		devices, _ := o.kubelet.Devices(r.Resource)
		for _, d := range devices {
			health[d.GetID()], resource[d.GetID()] = d.GetHealth() == v1beta1.Healthy, r.Resource
		}
	}
	return health, resource
}
