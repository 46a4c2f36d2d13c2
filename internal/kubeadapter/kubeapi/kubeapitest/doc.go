// Package kubeapitest is an API server in memory for tests: ResourceSlices with list, watch, create, update and delete, ResourceClaims and
// Nodes to read, and what goes wrong with API servers: conflicts, refusals, lost answers, silent watches, dropped fields, outages, tokens
// and CA certificates that are replaced, the deletion of all slices by a kubelet that starts.
//
// Start serves on a TCP port, for clients in other processes, too. NewInMemory serves without a network, for tests in a bubble of
// testing/synctest. Rules that tests rely on are those of Kubernetes 1.37.1; test/conformance compares the wire format with k8s.io/api.
package kubeapitest
