package cudaproof

import (
	"fmt"
)

// Fault is the verdict that the GPU failed: it stored or computed a wrong value, or its driver reported a fault of the hardware.
type Fault struct{ Text string }

func (f *Fault) Error() string { return f.Text }

func faultf(format string, args ...any) error { return &Fault{fmt.Sprintf(format, args...)} }

// CallError is a call of the driver that failed.
type CallError struct {
	Call string // "cuMemAlloc"
	Code int    // CUresult
	Name string // "CUDA_ERROR_OUT_OF_MEMORY"
	Text string // "out of memory", as the driver has it
}

func (e *CallError) Error() string {
	text := fmt.Sprintf("%s: %s (%d): %s", e.Call, e.Name, e.Code, e.Text)
	if remedy := remedies[e.Code]; remedy != "" {
		text += ": " + remedy
	}
	return text
}

// Values of CUresult (cuda.h). Only eccUncorrectable is a verdict on the GPU: memory of it lost a value. All others mean that the proof could not run,
// also these, which a fault of the hardware can cause:
//
//   - illegalAddress, illegalInstruction, misalignedAddress, invalidAddressSpace, invalidPC, hardwareStackError, assert and launchFailed are what a
//     kernel does. The name hardwareStackError is of the stack in hardware, which a program can corrupt. A fault of this program, of the driver's
//     compiler or of the driver gives the same codes on each GPU of a kind, and would make all of them unhealthy at once.
//   - nvlinkUncorrectable: the link's other end, its cable or a switch may be the cause. The proof uses no link.
//   - contained: "invalid accesses of peer GPU memory", or "certain classes of hardware errors". Programs meet it without a fault of hardware.
//   - unknown, launchTimeout, externalDevice, mps...: they are no evidence about the GPU.
//
// Where the hardware is the cause, the driver also logs an XID, and the agents' table of XIDs has the verdict.
const (
	outOfMemory            = 2
	stubLibrary            = 34
	deviceUnavailable      = 46
	noDevice               = 100
	invalidDevice          = 101
	eccUncorrectable       = 214
	invalidPTX             = 218
	nvlinkUncorrectable    = 220
	compilerNotFound       = 221
	unsupportedPTX         = 222
	compilationDisabled    = 223
	contained              = 226
	operatingSystem        = 304
	illegalAddress         = 700
	launchTimeout          = 702
	launchFailed           = 719
	notPermitted           = 800
	systemNotReady         = 802
	systemDriverMismatch   = 803
	compatNotSupported     = 804
	mpsConnectionFailed    = 805
	mpsRPCFailure          = 806
	mpsServerNotReady      = 807
	mpsMaxClients          = 808
	mpsMaxConnections      = 809
	mpsClientTerminated    = 810
	externalDevice         = 911
	unknown                = 999
	useOfOthers            = "another process uses the GPU: end it, and prove again"
	ofMPS                  = "an MPS control daemon serves the GPU: end it, and prove again"
	otherVerdict           = "not a verdict on the GPU: see its XIDs (inspect, dmesg)"
	libraryOfDriver        = "install the driver's own library"
	missingRightsOrDevices = "the device nodes /dev/nvidia*, or the rights on them, are missing: nvidia-smi -L shows what there is"
)

// remedies are what a person can do.
var remedies = map[int]string{
	outOfMemory: useOfOthers, deviceUnavailable: "the compute mode is exclusive or prohibited, or the GPU needs a reset: nvidia-smi -q -d COMPUTE",
	stubLibrary: libraryOfDriver, noDevice: missingRightsOrDevices, invalidDevice: missingRightsOrDevices, operatingSystem: missingRightsOrDevices, notPermitted: missingRightsOrDevices,
	compilerNotFound:    "libnvidia-ptxjitcompiler.so.1, which is part of the driver, is missing, or not where the linker looks (LD_LIBRARY_PATH)",
	compilationDisabled: "unset CUDA_DISABLE_PTX_JIT", invalidPTX: "the driver is older than the program needs, or this is a fault of the program", unsupportedPTX: "the driver is older than the program needs",
	systemNotReady: "the fabric manager does not run, or is not done", systemDriverMismatch: "the library is of another version than the kernel module: load the module of the installed driver",
	compatNotSupported:  "the library is of CUDA's forward compatibility, which this GPU does not have: use the driver's own",
	mpsConnectionFailed: ofMPS, mpsRPCFailure: ofMPS, mpsServerNotReady: ofMPS, mpsMaxClients: ofMPS, mpsMaxConnections: ofMPS, mpsClientTerminated: ofMPS,
	nvlinkUncorrectable: otherVerdict, contained: otherVerdict, illegalAddress: otherVerdict, launchTimeout: otherVerdict, launchFailed: otherVerdict,
	externalDevice: otherVerdict, unknown: otherVerdict,
}

// verdict makes a Fault of an error of the driver that is one.
func verdict(e *CallError) error {
	if e.Code == eccUncorrectable {
		return faultf("the driver reports an uncorrectable error of the GPU's memory: %s", e.Error())
	}
	return e
}
