//go:build before1.35

package dra

import (
	"context"

	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/pluginmanager"
)

func runPlugins(ctx context.Context, m pluginmanager.PluginManager, ready config.SourcesReady) {
	m.Run(ready, ctx.Done())
}
