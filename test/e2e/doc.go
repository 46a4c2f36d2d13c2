// Package e2e runs both agents under the real orchestrators, on one machine without a network: a Nomad
// agent and a whole one-node Kubernetes share one simulated 8-GPU machine, while kubelet, the plugins and
// a GPU are taken away and brought back.
//
// It is one story told in steps, so a step that fails ends it. Start it with "make e2e" (root): the tests
// are behind the build tag e2e, and expect the sandbox script around them and the orchestrators in PATH.
package e2e
