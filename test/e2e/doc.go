// Package e2e runs both agents under the real orchestrators, on a machine without a network: Nomad agents and a
// whole Kubernetes share one simulated 8-GPU machine, while kubelet, the plugins, the driver and a GPU are
// taken away and brought back. A cluster can have more nodes, each on a machine of its own.
//
// The steps of a test depend on those before, so a step that fails ends it. Start them with "make e2e" (root): they are behind
// the build tag e2e, and each expects the sandbox script around it and the orchestrators in PATH.
package e2e
