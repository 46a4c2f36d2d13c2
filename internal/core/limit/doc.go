// Package limit decides which limits of device memory the driver is to hold for which control groups, and whether it holds them: pure. It calls a share limited
// only if the kernel and the driver show that it is, and only for as long as they do.
package limit
