//go:build !before1.35

package dra

import (
	"context"

	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

func runPlugins(ctx context.Context, m pluginmanager.PluginManager, ready config.SourcesReady) {
	m.Run(ctx, ready, ctx.Done())
}

func claimMessage(namespace, name, uid string) *drapb.Claim {
	return &drapb.Claim{Namespace: namespace, Name: name, Uid: uid}
}

func cdiNames(d *drapb.Device) []string { return d.GetCdiDeviceIds() }

// pastForgiven is whether the device manager leaves a name that it knows from a device plugin to DRA, where the scheduler did.
const pastForgiven = true

// shareIDs is whether the kubelet's API has the share of a device that a claim has.
const shareIDs = true

func shareID(d *drapb.Device) string { return d.GetShareId() }

func healthTimeout(d *drahealth.DeviceHealth) int64 { return d.GetHealthCheckTimeoutSeconds() }
