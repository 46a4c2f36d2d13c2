// Package nomad tests nomad-gpu under Nomad's own client code: the plugin loader, the device manager, the scheduler, the
// task runner and the drivers of the release in go.mod run in this process, and the built binary in a process of its own on a simulated machine.
//
// It is a module of its own, because that code is under the BUSL, and shares no Go code with the product. Run it with
// -trimpath, so that the build cache of a Nomad that was built with it is used.
package nomad
