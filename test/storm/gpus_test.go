package storm

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

const gpus = 8 // of the machine

// layouts are MIG layouts of a GPU.
var layouts = [][]string{
	{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"},
	{"7g.80gb"},
	{"3g.40gb", "1g.10gb", "2g.20gb"},
	{"3g.40gb", "3g.40gb"},
	{"2g.20gb", "2g.20gb", "1g.10gb"},
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

// usageCalls are those that only the statistics need.
var usageCalls = []string{
	"nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetEncoderUtilization",
	"nvmlDeviceGetDecoderUtilization", "nvmlDeviceGetMemoryErrorCounter",
}

// driverCalls are those about no GPU, without those about events.
var driverCalls = []string{
	"nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion",
	"nvmlDeviceGetHandleByIndex",
}

// returnCodes are those that a call may fail with; the last two concern the driver as a whole. LIB_RM_VERSION_MISMATCH is not one of
// them: it ends the process.
var returnCodes = []string{
	"UNKNOWN", "UNKNOWN", "GPU_IS_LOST", "TIMEOUT", "NOT_SUPPORTED", "NO_PERMISSION", "INVALID_ARGUMENT",
	"INSUFFICIENT_POWER", "IRQ_ISSUE", "OPERATING_SYSTEM", "MEMORY", "NO_DATA", "NOT_FOUND", "RESET_REQUIRED",
	"IN_USE", "INSUFFICIENT_SIZE", "CORRUPTED_INFOROM", "NOT_READY", "GPU_NOT_FOUND", "INVALID_STATE",
	"FUNCTION_NOT_FOUND", "DEPRECATED", "UNINITIALIZED", "DRIVER_NOT_LOADED",
}

func gpuReturnCode(r *rand.Rand) string { return one(r, returnCodes[:len(returnCodes)-2]...) }

// fatalXIDs are codes after which only a reset makes the GPU healthy.
var fatalXIDs = []int{46, 119, 140, 167, 175}

// clockSteps are those of the wall clock, in either direction.
var clockSteps = []time.Duration{2 * time.Second, time.Minute, 2 * time.Hour, 26 * time.Hour, 400 * 24 * time.Hour}

func drawClockStep(r *rand.Rand, f *fault) {
	f.took = one(r, clockSteps...) * time.Duration(1-2*r.IntN(2))
}

// removedGPU is a GPU that is not in its slot.
type removedGPU struct {
	uuid string
	keys []string // of the simulated machine, without the UUID
	mig  bool
}

// removeGPU takes a GPU out of its slot: those behind it get other indices.
func (s *storm) removeGPU(slot int) error {
	g := removedGPU{uuid: s.UUID(slot)}
	for _, key := range []string{"pci", "numa", "minor", "module_id", "board_id", "serial"} {
		v, err := s.Get(slot, key)
		if err != nil {
			return err
		}
		g.keys = append(g.keys, key+" = "+v)
	}
	mig, err := s.Get(slot, "mig")
	if err != nil {
		return err
	}
	g.mig = mig == "yes"
	s.removed[slot] = g
	s.moves++
	s.journal.note("%.12s is removed from slot %d", g.uuid, slot)
	return s.Remove(slot)
}

// addGPU puts a GPU into a slot from which one was removed; it gets the last index. One in MIG mode is partitioned again.
func (s *storm) addGPU(slot int, uuid string) error {
	g := s.removed[slot]
	delete(s.removed, slot)
	s.journal.note("%.12s is put into slot %d", uuid, slot)
	if err := s.Add(slot, append(slices.Clone(g.keys), "uuid = "+uuid)...); err != nil || !g.mig {
		return err
	}
	return s.SetMIG(slot, layouts[0]...)
}

// newUUID is that of a GPU which was never in the machine.
func (s *storm) newUUID() string {
	r := s.random
	return fmt.Sprintf("GPU-%08x-%04x-4%03x-8%03x-%012x", r.Uint32(), r.Uint32()&0xffff, r.Uint32()&0xfff, r.Uint32()&0xfff, r.Uint64()&(1<<48-1))
}

// checkViolations fails the test if agents used NVML wrongly. A lookup may reach a GPU in which a call hangs: a GPU that is removed gives its
// index, and one that is replaced its PCI address, to another one between the last reading of both and the next lookup. That can't be avoided, is
// harmless, and happens at most once for each change and agent.
//
//	reader   count: 8, index 3 is GPU 3 .......... lookup of index 3: GPU 4, which hangs
//	machine             GPU 0 is removed, GPU 4 moves up ...^
//
// If that GPU has hung since before its UUID was read, the lookup is followed by a call for the UUID, which ends in the same call.
//
// If the lookup by index itself hangs, which GPU it has reached is not known: that GPU is found at its new index, and used, beside it.
//
//	machine  GPU 4 is put into its slot, GPU 5 is at index 6 ....... GPU 3 is removed, GPU 5 is at index 5
//	reader   lookup of index 6: GPU 5, hangs .................................................. lookup of index 5: GPU 5
func (s *storm) checkViolations(agents int, expected func(line string) bool) {
	violations, err := s.Violations()
	lookups, others := lookupsOfHungGPUs(slices.DeleteFunc(slices.Clone(violations), func(line string) bool {
		return expected(line) || s.moves > 0 && strings.Contains(line, " while nvmlDeviceGetHandleByIndex_v2 is in progress")
	}))
	if err != nil || len(others) > 0 || lookups > agents*s.moves {
		s.fail("NVML used wrongly, indices changed %d times: %q, %v", s.moves, violations, err)
		return
	}
	s.lookups += lookups
	s.moves = 0
	if err := s.ForgiveViolations(); err != nil {
		s.fail("violations: %w", err)
	}
}

// lookupsOfHungGPUs counts the lookups among violations that reached a GPU in which a call hangs.
func lookupsOfHungGPUs(violations []string) (n int, others []string) {
	lookups, named := map[string]int{}, map[string]int{}
	for _, line := range violations {
		call, on, _ := strings.Cut(line, ": called on ")
		gpu, _, _ := strings.Cut(on, " ")
		switch {
		case strings.HasSuffix(call, " nvmlDeviceGetHandleByIndex_v2"), strings.HasSuffix(call, " nvmlDeviceGetHandleByPciBusId_v2"):
			lookups[gpu]++
			n++
		case strings.HasSuffix(call, " nvmlDeviceGetUUID") && named[gpu] < lookups[gpu]:
			named[gpu]++
		case strings.Contains(call, " nvmlDeviceGetPciInfo") && named[gpu] > 0: // part of that lookup, when its call returned
		default:
			others = append(others, line)
		}
	}
	return n, others
}
