//go:build before1.36

package dra

// healthInStatus is whether kubelets of this version read the health of devices and write it into the status of pods, by default.
const healthInStatus = false
