//go:build before1.36

package dra

import (
	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
)

// These gates are off by default before 1.36: a cluster whose GPUs have faults, shares or an extended resource switches them on. What the agent
// does without them is in the package wire.
func init() {
	if err := utilfeature.DefaultMutableFeatureGate.Set("DRADeviceTaints=true,DRAConsumableCapacity=true,DRAExtendedResource=true,ResourceHealthStatus=true"); err != nil {
		panic(err)
	}
}

// Kubelets before 1.36 read whether a device is healthy, and no text.

const healthMessages = false

func healthMessage(*drahealth.DeviceHealth) string { return "" }

func statusMessage(v1.ResourceHealth) string { return "" }

func (s *apiServer) nodeOf() (*v1.Node, error) { return s.node, nil }
