// Package allocator compares the GPUs that a request gets with those of NVIDIA's k8s-device-plugin: its library
// go-gpuallocator, of the release in go.mod, reads the same simulated machine in this process.
//
// It is a module of its own, because the product does not need the library.
package allocator
