//go:build before1.35

package dra

import (
	"context"

	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

func runPlugins(ctx context.Context, m pluginmanager.PluginManager, ready config.SourcesReady) {
	m.Run(ready, ctx.Done())
}

func claimMessage(namespace, name, uid string) *drapb.Claim {
	return &drapb.Claim{Namespace: namespace, Name: name, UID: uid}
}

func cdiNames(d *drapb.Device) []string { return d.GetCDIDeviceIDs() }

// Kubelets of 1.34 do not know which share of a device a claim has, nor after which time a device's health is stale.

const shareIDs = false

func shareID(*drapb.Device) string { return "" }

func healthTimeout(*drahealth.DeviceHealth) int64 { return 0 }
