// Package labels compares the node labels of k8s-gpu with those of NVIDIA's gpu-feature-discovery: both programs run on the same
// simulated machine, with the same configuration file.
package labels
