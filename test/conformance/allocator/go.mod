// The tests compare with NVIDIA's library in this process, which is no dependency of the product. The library is built with
// a later go-nvlib than its own, which does not compile with the product's go-nvml.
module github.com/tandem-gpu/tandem/test/conformance/allocator

go 1.26.0

require (
	github.com/NVIDIA/go-gpuallocator v0.6.0
	github.com/NVIDIA/go-nvml v0.13.4-0
	github.com/tandem-gpu/tandem v0.0.0
)

require (
	github.com/NVIDIA/go-nvlib v0.12.0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
)

replace github.com/tandem-gpu/tandem => ../../..
