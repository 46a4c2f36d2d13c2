package storm

import (
	"math/rand/v2"
	"slices"
	"time"
)

// kind is a kind of fault.
type kind struct {
	name    string
	weight  int
	domains []string // of two faults of the same GPU that share one, only one is in force
	claims  bool     // it must be noticed if it lasts
	gpu     bool     // it concerns one GPU
	mig     bool     // in MIG mode
	policy  bool     // where there is one
	weather bool     // it concerns the driver as a whole
	hangs   bool     // calls do not return
	draw    func(*rand.Rand, *fault)
	strike  func(*storm, *fault) error
	lift    func(*storm, *fault) error // nil if it is over at once
}

// kinds are all that can happen. It is filled at init because what a fault does draws on the table.
var kinds []kind

func init() {
	kinds = []kind{
		{name: "call fails", weight: 14, domains: []string{"calls"}, gpu: true, draw: drawFail, strike: failCall, lift: healCalls},
		{name: "call hangs", claims: true, weight: 8, domains: []string{"calls"}, gpu: true, hangs: true, draw: drawHang, strike: hangCall, lift: healCalls},
		{name: "call is slow", weight: 8, domains: []string{"calls"}, gpu: true, draw: drawSlow, strike: slowCall, lift: healCalls},

		{name: "lost", claims: true, weight: 8, domains: []string{"bus"}, gpu: true, strike: lose, lift: restore},
		{name: "unbound", claims: true, weight: 4, domains: []string{"bus"}, gpu: true, strike: unbind, lift: bind},
		{name: "pulled", claims: true, weight: 4, domains: []string{"bus"}, gpu: true, strike: pull, lift: plug},
		{name: "exchanged", weight: 3, domains: []string{"bus"}, gpu: true, strike: exchange},
		{name: "driver wants something", claims: true, weight: 7, domains: []string{"word"}, gpu: true, draw: drawVerdict, strike: want, lift: wantNothing},
		{name: "reset", weight: 4, domains: []string{"word"}, gpu: true, strike: reset},
		{name: "handles invalidated", weight: 3, gpu: true, strike: invalidate},
		{name: "cut anew", weight: 5, domains: []string{"bus"}, gpu: true, mig: true, draw: drawLayout, strike: cutAnew},

		{name: "fatal XID", weight: 4, gpu: true, draw: drawXID(46, 119, 140, 167, 175), strike: fatalXID},
		{name: "fatal XID, and a reset", claims: true, weight: 4, domains: []string{"bus", "word"}, gpu: true, draw: drawXID(46, 119, 140, 167, 175), strike: fatalXID, lift: resetAfter},
		{name: "severe XID", weight: 5, gpu: true, draw: drawXID(48, 62, 64, 79, 95, 120, 156, 158, 171), strike: severeXID},
		{name: "application XID", weight: 7, gpu: true, draw: drawXID(13, 31, 43, 45, 69), strike: harmlessXID},
		{name: "strange XID", weight: 4, gpu: true, draw: drawXID(63, 92, 94, 7, 109, 145, 154, 999, 1234), strike: strangeXID},
		{name: "event", weight: 5, gpu: true, draw: drawEvent, strike: event},
		{name: "flood of XIDs", weight: 3, gpu: true, draw: drawFlood, strike: flood},

		{name: "event calls", weight: 5, domains: []string{"driver"}, draw: drawEars, strike: callOfAll, lift: healAll},
		{name: "driver's call", weight: 3, domains: []string{"driver"}, weather: true, draw: drawNode, strike: callOfAll, lift: healAll},
		{name: "slow statistics", weight: 4, domains: []string{"driver"}, draw: drawSlowStatistics, strike: callOfAll, lift: healAll},
		{name: "clock jumps", weight: 4, draw: drawJump, strike: jumpClock},
		{name: "unloaded", claims: true, weight: 3, domains: []string{"driver"}, weather: true, strike: unload, lift: load},
		{name: "reloaded", weight: 2, domains: []string{"driver"}, weather: true, strike: reload},
		{name: "library hidden", weight: 2, domains: []string{"driver"}, weather: true, strike: hide, lift: unhide},

		{name: "maintenance", claims: true, weight: 3, domains: []string{"driver"}, weather: true, strike: quiesce, lift: resume},

		{name: "policy changes", weight: 5, domains: []string{"bus"}, gpu: true, policy: true, draw: drawTerms, strike: changePolicy},
		{name: "MPS daemons die", claims: true, weight: 4, domains: []string{"daemons"}, policy: true, strike: stopDaemons, lift: startDaemons},

		{name: "kubelet stops", weight: 3, domains: []string{"kubelet"}, draw: drawDown, strike: stopKubelet, lift: startKubelet},
		{name: "kubelet crashes", weight: 3, domains: []string{"kubelet"}, draw: drawDown, strike: crashKubelet, lift: startKubelet},
		{name: "kubelet is unkind", weight: 2, domains: []string{"kubelet"}, draw: drawHabit, strike: unkind, lift: beKind},
		{name: "kubelet hangs up", weight: 2, domains: []string{"kubelet"}, strike: hangUp},
		{name: "fingerprint opened anew", weight: 3, strike: openFingerprint},
		{name: "numbers opened anew", weight: 3, strike: openStats},
	}
}

// gpuCalls are the calls about a GPU that a session makes.
var gpuCalls = []string{
	"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetUUID", "nvmlDeviceGetPciInfo",
	"nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetBAR1MemoryInfo",
	"nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerUsage",
	"nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetMaxPcieLinkGeneration", "nvmlDeviceGetMaxPcieLinkWidth",
	"nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetDisplayMode", "nvmlDeviceGetPersistenceMode",
	"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization", "nvmlDeviceGetDecoderUtilization",
	"nvmlDeviceGetTemperature", "nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetFieldValues",
	"nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRepairStatus",
	"nvmlDeviceGetUnrepairableMemoryFlag_v1", "nvmlDeviceGetSramEccErrorStatus",
	"nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth", "nvmlDeviceGetGpuFabricInfoV",
	"nvmlDeviceGetGpuFabricInfo", "nvmlDeviceValidateInforom", "nvmlDeviceGetMigMode",
	"nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetGpuInstanceId",
	"nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes", "nvmlDeviceGetGpuInstanceById",
	"nvmlGpuInstanceGetInfo", "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetTopologyCommonAncestor",
	"nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo", "nvmlDeviceGetNvLinkRemoteDeviceType",
	"nvmlDeviceGetSerial", "nvmlDeviceGetArchitecture", "nvmlDeviceGetBrand", "nvmlDeviceGetEccMode",
	"nvmlDeviceGetSupportedEventTypes", "nvmlDeviceRegisterEvents", "*", "*", "nvmlDeviceGetUUID",
}

// numberCalls are those that only live numbers need.
var numberCalls = []string{
	"nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization",
	"nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetMemoryErrorCounter",
}

// nodeCalls are those about none, but for events.
var nodeCalls = []string{
	"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
	"nvmlDeviceGetHandleByIndex",
}

// returns are answers that a call may fail with; the last two are about the driver as a whole. A driver of another
// version is left out: it ends the process.
var returns = []string{
	"UNKNOWN", "UNKNOWN", "GPU_IS_LOST", "TIMEOUT", "NOT_SUPPORTED", "NO_PERMISSION", "INVALID_ARGUMENT",
	"INSUFFICIENT_POWER", "IRQ_ISSUE", "OPERATING_SYSTEM", "MEMORY", "NO_DATA", "NOT_FOUND", "RESET_REQUIRED",
	"IN_USE", "INSUFFICIENT_SIZE", "CORRUPTED_INFOROM", "NOT_READY", "GPU_NOT_FOUND", "INVALID_STATE",
	"FUNCTION_NOT_FOUND", "DEPRECATED", "UNINITIALIZED", "DRIVER_NOT_LOADED",
}

const ofTheDriver = 2 // of returns

func drawFail(r *rand.Rand, f *fault) {
	f.call, f.code = one(r, gpuCalls...), one(r, returns[:len(returns)-ofTheDriver]...)
	if r.IntN(2) == 0 {
		f.count = 1 + r.IntN(4)
	}
}

// drawHang draws a call that hangs: one that is made in each check, or any.
func drawHang(r *rand.Rand, f *fault) { f.call = one(r, "*", "nvmlDeviceGetUUID", one(r, gpuCalls...)) }

func drawSlow(r *rand.Rand, f *fault) {
	f.call, f.took = one(r, gpuCalls...), time.Duration(5+r.IntN(35))*time.Millisecond
	if f.call == "*" {
		f.took = 4 * time.Millisecond
	}
}

func drawVerdict(r *rand.Rand, f *fault) { f.count = one(r, 1, 1, 2, 3, 4, 6, 99) }

func drawXID(codes ...int) func(*rand.Rand, *fault) {
	return func(r *rand.Rand, f *fault) { f.count = one(r, codes...) }
}

// drawEvent draws a type of event (nvml.h, nvmlEventType): clocks and power, MIG, and those that name a fault.
func drawEvent(r *rand.Rand, f *fault) {
	f.count = one(r, 0x1, 0x2, 0x4, 0x10, 0x80, 0x100, 0x200, 0x400, 0x1000, 0x2000, 0x4000, 0x8000)
}

func drawFlood(r *rand.Rand, f *fault) { f.count = 50 + r.IntN(1000) }

func drawLayout(r *rand.Rand, f *fault) { f.count = r.IntN(len(layouts)) }

func drawDown(r *rand.Rand, f *fault) { f.lasts = time.Duration(r.IntN(1500)) * time.Millisecond }

func drawHabit(r *rand.Rand, f *fault) { f.count = r.IntN(len(habits)) }

// drawEars draws a fault of the calls about events, which is no GPU's fault.
func drawEars(r *rand.Rand, f *fault) {
	f.call = one(r, "nvmlEventSetWait", "nvmlEventSetWait", "nvmlEventSetCreate", "nvmlEventSetFree",
		"nvmlSystemEventSetWait", "nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents")
	f.code = one(r, returns[:len(returns)-ofTheDriver]...)
	if f.call == "nvmlEventSetWait" && r.IntN(3) == 0 {
		f.code = hang
	}
}

// drawSlowStatistics draws a call that only live numbers need. No check may be late because of it.
func drawSlowStatistics(r *rand.Rand, f *fault) {
	f.call, f.code, f.took = one(r, numberCalls...), crawl, time.Duration(50+r.IntN(550))*time.Millisecond
	f.lasts = time.Second + time.Duration(r.Int64N(int64(2*time.Second)))
}

// jumps are steps of the wall clock, in either direction.
var jumps = []time.Duration{2 * time.Second, time.Minute, 2 * time.Hour, 26 * time.Hour, 400 * 24 * time.Hour}

func drawJump(r *rand.Rand, f *fault) { f.took = one(r, jumps...) * time.Duration(1-2*r.IntN(2)) }

func drawNode(r *rand.Rand, f *fault) {
	f.call, f.code = one(r, nodeCalls...), one(r, append(slices.Clone(returns), hang, hang, hang, hang, crawl)...)
	if f.code == crawl {
		f.took = 20 * time.Millisecond
	}
}

// In place of a code: the call does not come back, or takes its time.
const (
	hang  = "hang"
	crawl = "slow"
)
