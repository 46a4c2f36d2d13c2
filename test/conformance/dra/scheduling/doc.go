// Package scheduling gives the devices that this repository's agent publishes to the parts of Kubernetes that read them: the API
// server's validation, the scheduler's allocator, the device taint eviction controller, in process and without an agent.
package scheduling
