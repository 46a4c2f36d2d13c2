/* What one GPU answers about itself: each call reads its key of machine.conf. */
#include "memacct.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <linux/capability.h>

static nvmlReturn_t give(u64 value, unsigned *out)
{
    NEED(out);
    if (value == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *out = (unsigned)value;
    return NVML_SUCCESS;
}

static nvmlReturn_t give_long(u64 value, u64 *out)
{
    NEED(out);
    if (value == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *out = value;
    return NVML_SUCCESS;
}

static u64 or_zero(u64 v) { return v == UNSET ? 0 : v; }

/* A call that returns one number of a whole GPU. That an instance has none is a guess where nvml.h is silent; the real
 * library may return INVALID_ARGUMENT. */
#define NUMBER(fn, type, key)                                       \
    nvmlReturn_t fn(nvmlDevice_t device, type *out)                 \
    {                                                               \
        ENTER_GPU(device);                                          \
        WHOLE_GPU_ONLY();                                           \
        return give(c.gpu->key, (unsigned *)out);                   \
    }

NUMBER(nvmlDeviceGetMinorNumber, unsigned, minor)
NUMBER(nvmlDeviceGetBrand, nvmlBrandType_t, brand)
NUMBER(nvmlDeviceGetBoardId, unsigned, board_id)
NUMBER(nvmlDeviceGetModuleId, unsigned, module_id)
NUMBER(nvmlDeviceGetVirtualizationMode, nvmlGpuVirtualizationMode_t, virtualization)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, memory_bus_width)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, power_limit)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, power_limit)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, power_limit_default)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, power_usage)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, max_pcie_gen)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, gpu_max_pcie_gen)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, max_pcie_width)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, pcie_gen)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, pcie_width)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, pcie_replays)
NUMBER(nvmlDeviceGetDisplayMode, nvmlEnableState_t, display_mode)
NUMBER(nvmlDeviceGetDisplayActive, nvmlEnableState_t, display_active)
NUMBER(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, persistence)
NUMBER(nvmlDeviceGetPerformanceState, nvmlPstates_t, pstate)
NUMBER(nvmlDeviceGetFanSpeed, unsigned, fan)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, nvmlEnableState_t, retired_pending)

/* nvml.h: with MIG on neither the GPU nor an instance has a count of cores; the compute mode is an instance's then. */
nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned int *cores)
{
    ENTER_GPU(device);
    if (c.mig || c.gpu->mig == 1) return NVML_ERROR_NOT_SUPPORTED;
    return give(c.gpu->cores, cores);
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    ENTER_GPU(device);
    if (!c.mig && c.gpu->mig == 1) return NVML_ERROR_NOT_SUPPORTED;
    return give(c.gpu->compute_mode, (unsigned *)mode);
}

nvmlReturn_t nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode)
{
    ENTER_GPU(device);
    NEED(mode);
    if (mode->version != nvmlDeviceAddressingMode_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return give(c.gpu->addressing_mode, &mode->value);
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *arch)
{
    ENTER_GPU(device);
    return give(c.gpu->arch, arch);
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER_GPU(device);
    NEED(major && minor);
    if (c.gpu->compute == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *major = (int)(c.gpu->compute >> 16);
    *minor = (int)(c.gpu->compute & 0xffff);
    return NVML_SUCCESS;
}

/* ---- memory ---- */

/* In a control group with a limit one of the two calls has that as the total; nvml.h names v2 for it. */
static bool limited(struct call *c, const char *version, nvmlGetMemoryLimits_v1_t *limits)
{
    return !c->mig && sim_has_limits(c->m) && !strcmp(c->m->limited_total, version) && memacct_own_limit(sim_dir(), c->m, c->gpu, limits);
}

/* Both versions agree with each other: v1 counts the driver's reserve as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER_GPU(device);
    NEED(memory);
    u64 total = c.mig ? c.mig->profile.memory : c.gpu->memory;
    if (total == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    u64 used = c.mig ? c.mig->memory_used : or_zero(c.gpu->memory_used) + or_zero(c.gpu->memory_reserved);
    nvmlGetMemoryLimits_v1_t l;
    if (limited(&c, "v1", &l)) total = l.hardLimit, used = l.currentUsed;
    *memory = (nvmlMemory_t){.total = total, .free = total > used ? total - used : 0, .used = used};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER_GPU(device);
    NEED(memory);
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory->total = c.mig ? c.mig->profile.memory : c.gpu->memory;
    if (memory->total == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    memory->reserved = c.mig ? 0 : or_zero(c.gpu->memory_reserved);
    memory->used = c.mig ? c.mig->memory_used : or_zero(c.gpu->memory_used);
    nvmlGetMemoryLimits_v1_t l;
    if (limited(&c, "v2", &l)) memory->total = l.hardLimit, memory->used = l.currentUsed, memory->reserved = 0;
    u64 taken = memory->used + memory->reserved;
    memory->free = memory->total > taken ? memory->total - taken : 0;
    return NVML_SUCCESS;
}

/* What RM asks for: CAP_SYS_ADMIN. */
static bool privileged(void)
{
    struct __user_cap_header_struct of = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct have[2] = {0};
    return !syscall(SYS_capget, &of, have) && have[0].effective >> CAP_SYS_ADMIN & 1;
}

/* A library before 615 does not have these two. A process of a test may have loaded the library of a newer machine. */
#define NEED_LIMITS()                                                             \
    do {                                                                          \
        if (!sim_has_limits(c.m)) return NVML_ERROR_FUNCTION_NOT_FOUND;           \
        NEED(limits && limits->nameSpace);                                        \
        if (c.mig || !*c.m->memacct) return NVML_ERROR_NOT_SUPPORTED;             \
    } while (0)

/* That NVML compares the limits with the total and with each other, before it looks for rights, is an assumption: nvml.h only has the code. */
nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
    ENTER_GPU(device);
    NEED_LIMITS();
    u64 total = or_zero(c.gpu->memory), hard = limits->hardLimit;
    if (limits->softLimit > hard || (total && (limits->softLimit > total || (hard > total && hard != NO_LIMIT)))) return NVML_ERROR_INVALID_ARGUMENT;
    if (!privileged()) return NVML_ERROR_NO_PERMISSION;
    return memacct_set(sim_dir(), c.m, c.gpu, limits->nameSpace, limits->softLimit, hard);
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    ENTER_GPU(device);
    NEED_LIMITS();
    return memacct_get(sim_dir(), c.m, c.gpu, limits->nameSpace, limits);
}

/* An instance has as many slices of BAR1 as of memory, as nvidia-smi shows it. */
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *bar1)
{
    ENTER_GPU(device);
    NEED(bar1);
    if (c.gpu->bar1 == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    u64 slices = c.gpu->mig_slices == UNSET ? 8 : c.gpu->mig_slices;
    u64 total = c.mig ? c.gpu->bar1 * c.mig->profile.size / slices : c.gpu->bar1;
    u64 used = c.mig ? c.mig->bar1_used : or_zero(c.gpu->bar1_used);
    *bar1 = (nvmlBAR1Memory_t){.bar1Total = total, .bar1Free = total > used ? total - used : 0, .bar1Used = used};
    return NVML_SUCCESS;
}

/* ---- power, clocks, temperature ---- */

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *minLimit, unsigned int *maxLimit)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    nvmlReturn_t ret = give(c.gpu->power_limit_min, minLimit);
    return ret ? ret : give(c.gpu->power_limit_max, maxLimit);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    return give_long(c.gpu->energy, energy);
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    struct gpu *g = c.gpu;
    const u64 of[NVML_CLOCK_COUNT] = {g->clock_graphics, g->clock_sm, g->clock_memory, g->clock_video};
    NEED(type < NVML_CLOCK_COUNT);
    return give(of[type], clock);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    struct gpu *g = c.gpu;
    const u64 of[NVML_CLOCK_COUNT] = {g->max_clock_graphics, g->max_clock_sm, g->max_clock_memory, g->max_clock_video};
    NEED(type < NVML_CLOCK_COUNT);
    return give(of[type], clock);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned int *temp)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(sensor == NVML_TEMPERATURE_GPU);
    return give(c.gpu->temperature, temp);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(temperature);
    if (temperature->version != nvmlTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    NEED(temperature->sensorType == NVML_TEMPERATURE_GPU);
    return give(c.gpu->temperature, (unsigned *)&temperature->temperature);
}

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device, nvmlMarginTemperature_t *margin)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(margin);
    if (margin->version != nvmlMarginTemperature_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return give(c.gpu->margin_temperature, (unsigned *)&margin->marginTemperature);
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, nvmlTemperatureThresholds_t type, unsigned int *temp)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    if (type == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN) return give(c.gpu->shutdown_temperature, temp);
    if (type == NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) return give(c.gpu->slowdown_temperature, temp);
    return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t clock_reasons(struct call *c, unsigned long long *reasons)
{
    if (c->mig) return NVML_ERROR_NOT_SUPPORTED;
    return give_long(c->gpu->clock_reasons, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_GPU(device);
    return clock_reasons(&c, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons)
{
    ENTER_GPU(device);
    return clock_reasons(&c, reasons);
}

nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned int *value)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(counter < NVML_PCIE_UTIL_COUNT);
    return give(counter == NVML_PCIE_UTIL_TX_BYTES ? c.gpu->pcie_tx : c.gpu->pcie_rx, value);
}

/* ---- use: not supported while MIG is on, by handle of either kind (nvml.h) ---- */

#define NOT_UNDER_MIG() do { if (c.mig || c.gpu->mig == 1) return NVML_ERROR_NOT_SUPPORTED; } while (0)

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER_GPU(device);
    NOT_UNDER_MIG();
    NEED(utilization);
    nvmlReturn_t ret = give(c.gpu->utilization_gpu, &utilization->gpu);
    return ret ? ret : give(c.gpu->utilization_memory, &utilization->memory);
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *periodUs)
{
    ENTER_GPU(device);
    NOT_UNDER_MIG();
    NEED(periodUs);
    *periodUs = 167000;
    return give(c.gpu->encoder, utilization);
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *utilization, unsigned int *periodUs)
{
    ENTER_GPU(device);
    NOT_UNDER_MIG();
    NEED(periodUs);
    *periodUs = 167000;
    return give(c.gpu->decoder, utilization);
}

/* Copies the processes of the unit; *count is how many there are even when infos is too small. */
static nvmlReturn_t processes(struct call *c, unsigned *count, void *infos, int version)
{
    NEED(count);
    unsigned room = *count, n = 0;
    for (int i = 0; i < c->gpu->processes; i++) {
        struct process *p = &c->gpu->process[i];
        if (c->mig && (p->gi != c->mig->gi || p->ci != c->mig->ci)) continue;
        if (n < room && infos && version == 1) ((nvmlProcessInfo_v1_t *)infos)[n] = (nvmlProcessInfo_v1_t){p->pid, p->memory};
        if (n < room && infos && version != 1) ((nvmlProcessInfo_t *)infos)[n] = (nvmlProcessInfo_t){p->pid, p->memory, p->gi, p->ci};
        n++;
    }
    *count = n;
    return n > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos)
{
    ENTER_GPU(device);
    return processes(&c, count, infos, 1);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v2_t *infos)
{
    ENTER_GPU(device);
    return processes(&c, count, infos, 2);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
    ENTER_GPU(device);
    return processes(&c, count, infos, 3);
}

/* ---- errors ---- */

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    nvmlReturn_t ret = give(c.gpu->ecc, (unsigned *)current);
    return ret ? ret : give(c.gpu->ecc_pending == UNSET ? c.gpu->ecc : c.gpu->ecc_pending, (unsigned *)pending);
}

static u64 ecc_total(const struct gpu *g, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter)
{
    if (g->ecc != 1) return UNSET; /* counters exist with ECC on */
    if (type == NVML_MEMORY_ERROR_TYPE_CORRECTED)
        return counter == NVML_VOLATILE_ECC ? g->ecc_corrected_volatile : g->ecc_corrected_aggregate;
    return counter == NVML_VOLATILE_ECC ? g->ecc_uncorrected_volatile : g->ecc_uncorrected_aggregate;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *count)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    return give_long(ecc_total(c.gpu, type, counter), count);
}

/* The places errors are counted at; type and counter are not told apart here. */
nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, nvmlEccErrorCounts_t *counts)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(counts && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    struct gpu *g = c.gpu;
    if (g->ecc != 1 || g->ecc_device == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *counts = (nvmlEccErrorCounts_t){or_zero(g->ecc_l1), or_zero(g->ecc_l2), g->ecc_device, or_zero(g->ecc_register)};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter,
                                             nvmlMemoryLocation_t location, unsigned long long *count)
{
    ENTER_GPU(device);
    NEED(type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT && location < NVML_MEMORY_LOCATION_COUNT);
    if (c.gpu->ecc != 1) return NVML_ERROR_NOT_SUPPORTED;
    if (c.mig) /* nvml.h: "only supported for non-DRAM uncorrectable volatile errors" */
        return type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED && counter == NVML_VOLATILE_ECC && location == NVML_MEMORY_LOCATION_SRAM
                   ? give_long(c.mig->ecc_uncorrected, count) : NVML_ERROR_NOT_SUPPORTED;
    switch (location) {
    case NVML_MEMORY_LOCATION_L1_CACHE: return give_long(c.gpu->ecc_l1, count);
    case NVML_MEMORY_LOCATION_L2_CACHE: return give_long(c.gpu->ecc_l2, count);
    case NVML_MEMORY_LOCATION_DEVICE_MEMORY: return give_long(c.gpu->ecc_device, count);
    case NVML_MEMORY_LOCATION_REGISTER_FILE: return give_long(c.gpu->ecc_register, count);
    default: return NVML_ERROR_NOT_SUPPORTED;
    }
}

nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device, nvmlEccSramErrorStatus_t *status)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(status);
    if (status->version != nvmlEccSramErrorStatus_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (c.gpu->sram_threshold_exceeded == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    unsigned version = status->version;
    memset(status, 0, sizeof *status);
    status->version = version;
    status->bThresholdExceeded = (unsigned)c.gpu->sram_threshold_exceeded;
    return NVML_SUCCESS;
}

/* "On MIG-enabled GPUs with active instances, querying the number of remapped rows is not supported" (nvml.h). */
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrRows, unsigned int *uncRows,
                                       unsigned int *isPending, unsigned int *failureOccurred)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    struct gpu *g = c.gpu;
    if (g->mig == 1 && g->instances) return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t ret = give(g->remapped_correctable, corrRows);
    if (!ret) ret = give(g->remapped_uncorrectable, uncRows);
    if (!ret) ret = give(g->remapped_pending, isPending);
    return ret ? ret : give(g->remapped_failed, failureOccurred);
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogramValues_t *values)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(values);
    struct gpu *g = c.gpu;
    if ((g->mig == 1 && g->instances) || g->remap_banks_max == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *values = (nvmlRowRemapperHistogramValues_t){.max = (unsigned)g->remap_banks_max, .none = (unsigned)or_zero(g->remap_banks_none)};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRepairStatus(nvmlDevice_t device, nvmlRepairStatus_t *status)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(status);
    if (status->version != nvmlRepairStatus_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlReturn_t ret = give(c.gpu->channel_repair_pending, &status->bChannelRepairPending);
    return ret ? ret : give(c.gpu->tpc_repair_pending, &status->bTpcRepairPending);
}

nvmlReturn_t nvmlDeviceGetUnrepairableMemoryFlag_v1(nvmlDevice_t device, nvmlUnrepairableMemoryStatus_v1_t *status)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    NEED(status);
    return give(c.gpu->unrepairable_memory, &status->bUnrepairableMemory);
}

nvmlReturn_t nvmlDeviceValidateInforom(nvmlDevice_t device)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    if (c.gpu->inforom_corrupt == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    return c.gpu->inforom_corrupt ? NVML_ERROR_CORRUPTED_INFOROM : NVML_SUCCESS;
}
