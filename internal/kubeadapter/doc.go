// Package kubeadapter is the root of what Tandem has for Kubernetes: deviceplugin and dra serve the kubelet's two plugin APIs and
// do not import each other; kubeapi, podresources, containerruntime and nodelabels are what they and the commands read and write.
package kubeadapter
