//go:build before1.36

package kubelet

import utilfeature "k8s.io/apiserver/pkg/util/feature"

// ResourceHealthStatus is off by default before 1.36: a cluster that wants the health of devices in the status of pods switches it on.
func init() {
	if err := utilfeature.DefaultMutableFeatureGate.Set("ResourceHealthStatus=true"); err != nil {
		panic(err)
	}
}
