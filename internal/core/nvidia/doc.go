// Package nvidia asks NVIDIA's driver: it turns NVML, procfs and sysfs into the values of package core.
// It is the only package that uses cgo.
//
//	library.go   where libnvidia-ml.so.1 is, and which of its functions are there
//	mapped.go    the one library of a process, and whether another process would have another
//	session.go   open and close      abandon.go  what a close has to leave to the next
//	call.go      the one way in which a call is made
//	lane.go      one way to each GPU, so that one that hangs keeps nobody waiting
//	visit.go     questions to one GPU, or to all at once where they are slow
//	census.go    who is there        doors.go    and who is at an index that is nobody's
//	discover.go  readings            gpu.go      GPUs          mig.go     their instances
//	fixed.go     what is asked once              links.go    how they reach each other
//	capdev.go    nodes of instances              usage.go    live numbers
//	probe.go     checks              vitals.go   what a check knows of a GPU
//	fields.go    signs of health in the batch    signals.go    and by calls of their own
//	ears.go      event sets          wait.go     events        system.go  the kernel driver's comings and goings
//
// go-nvml binds functions when they are first called, for the whole process, and a function that the
// installed driver lacks ends the process. So every call goes through call, which looks first.
package nvidia
