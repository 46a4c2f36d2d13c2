package main

import (
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// Package config links no Kubernetes API, so it has its own copies of these paths.
func TestDefaultSockets(t *testing.T) {
	want := map[string]string{"kubelet-socket": v1beta1.KubeletSocket, "pod-resources-socket": podresources.DefaultSocket}
	for _, s := range config.KubernetesSpecs() {
		if path, ok := want[s.Flag]; ok && s.Default != path {
			t.Errorf("--%s is %s by default, want %s", s.Flag, s.Default, path)
		}
	}
}
