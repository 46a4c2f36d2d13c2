// Package nomad holds nomad-gpu against Nomad's own client code: the plugin loader, the device manager
// and the scheduler of the release in go.mod, in this process, with the built binary in a process of its
// own on a simulated machine.
//
// It is a module of its own because that code is under the BUSL, and it shares no Go code with the
// product: what it knows of nomad-gpu is the binary. Run it with -trimpath, so that the build cache of a
// Nomad that was built so is of use.
package nomad
