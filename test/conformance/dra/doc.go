// Package dra runs the built k8s-gpu as a DRA driver under the kubelet's own DRA manager, in process: the code that registers
// drivers, prepares claims and reads their health on a node. It also compares what the agent publishes with Kubernetes' own
// validation, allocator and eviction controller. It is a module of its own, since k8s.io/kubernetes is not a library.
package dra
