// Package nvidia reads NVIDIA's driver: NVML, procfs, sysfs and /dev become values of package core. It is the only package
// that uses cgo.
//
// A Session has two goroutines of the monitor: the reader calls Snapshot, Probe, Usage, MemoryLimits and SetMemoryLimit, the waiter calls Wait. A driver
// call can hang and can't be cancelled. So calls about GPUs run on a goroutine of their own, which leaves a GPU that hangs to
// itself, and the reader waits until a deadline. Calls about no GPU run on the reader or the waiter itself; Session.Busy reports
// calls that hang.
//
// A value that was there stays while the session lasts: see retained. A code such as NOT_SUPPORTED is a fact only of a
// call that never had an answer.
//
//	file               contents                                                     runs on
//	session.go         Open, Close (nvmlInit, nvmlShutdown)                         caller
//	shutdown.go        nvmlShutdown of sessions closed with a hung call             caller
//	call.go            how each NVML call is made                                   any
//	callcount.go       counters of the calls: DriverCalls                           any; no NVML
//	worker.go          one worker per GPU                                           reader
//	query.go           calls on workers, with a deadline                            reader
//	library.go         libnvidia-ml.so.1 and the functions that it has              any; no NVML
//	loadedlibrary.go   why a process keeps one library, version mismatch            reader
//	module.go          the kernel module, DriverFingerprint                         caller; no NVML
//	snapshot.go        Snapshot                                                     reader
//	enumeration.go     which GPUs there are: the known ones, by their handles       workers
//	lookup.go          which GPUs there are: unassigned NVML indices                workers
//	readgpu.go         properties of a GPU                                          worker
//	mig.go             MIG instances of a GPU                                       worker
//	topology.go        PCIe paths and NVLinks between GPUs                          workers
//	kernelfiles.go     /dev, procfs, sysfs: device nodes, MIG instances, NUMA       any; no NVML
//	nodewatch.go       events of device nodes                                       a goroutine of its own
//	probe.go           Probe                                                        reader
//	healthrecord.go    health check of a GPU                                        worker
//	signals.go         health signals: nvmlDeviceGetFieldValues, calls of their own worker
//	processes.go       processes with memory of a GPU                               worker
//	usage.go           Usage                                                        workers
//	limits.go          MemoryLimits, SetMemoryLimit                                 workers
//	counters.go        ECC, PCIe and NVLink counters: nvmlDeviceGetFieldValues      worker
//	eventsets.go       creation of NVML event sets                                  reader, workers
//	wait.go            Wait                                                         waiter
//	bindevents.go      system events: kernel driver bound and unbound               waiter
//	convert.go         NVML's strings and numbers as core's values
//	errors.go          errors, and what NVML's codes mean
//
// go-nvml binds functions when they are first called, for the whole process, and a call of a function that the library lacks
// ends the process. So every call is made by call, which checks library.has first.
package nvidia
