// Package hooks has NVIDIA's own hook program, in each version that treats limits of device memory in another way, set the limits that the agent writes into its
// CDI specification: for containers of runc, of containerd and of podman, in a tree of control groups of version 2. What the driver has in the end is read from
// the simulated driver. It has no code outside of its tests.
package hooks
