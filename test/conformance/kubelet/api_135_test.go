//go:build before1.37 && !before1.35

package kubelet

import (
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
)

func addHints(logger klog.Logger, topology topologymanager.Manager, m *devicemanager.ManagerImpl) {
	topology.AddHintProvider(logger, m)
}
