// Package nvidia asks NVIDIA's driver: it turns NVML, procfs and sysfs into the values of package core.
// It is the only package that uses cgo.
//
//	library.go   where libnvidia-ml.so.1 is, and which of its functions are there
//	session.go   open, close, and the one way in which a call is made
//	discover.go  GPUs           mig.go    their instances     links.go  how they reach each other
//	events.go    what happens   usage.go  live numbers        probe.go  signs of life
//
// go-nvml binds functions when they are first called, for the whole process, and a function that the
// installed driver lacks ends the process. So every call goes through call, which looks first.
package nvidia
