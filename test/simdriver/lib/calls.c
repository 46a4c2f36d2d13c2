/* Enumeration, lookup, identity, MIG. */
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static nvmlReturn_t copy_text(char *to, unsigned length, const char *text)
{
    if (!to) return NVML_ERROR_INVALID_ARGUMENT;
    if (!*text) return NVML_ERROR_NOT_SUPPORTED;
    if (strlen(text) >= length) return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

/* ---- system ---- */

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const struct { nvmlReturn_t r; const char *text; } texts[] = {
        {NVML_SUCCESS, "Success"}, {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
        {NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"}, {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
        {NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"}, {NVML_ERROR_NOT_FOUND, "Not Found"},
        {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
        {NVML_ERROR_INSUFFICIENT_POWER, "Insufficient External Power"},
        {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"}, {NVML_ERROR_TIMEOUT, "Timeout"},
        {NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue"}, {NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"},
        {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"}, {NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM"},
        {NVML_ERROR_GPU_IS_LOST, "GPU is lost"}, {NVML_ERROR_RESET_REQUIRED, "GPU requires reset"},
        {NVML_ERROR_OPERATING_SYSTEM, "GPU access blocked by the operating system"},
        {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
        {NVML_ERROR_IN_USE, "In use by another client"}, {NVML_ERROR_MEMORY, "Insufficient Memory"},
        {NVML_ERROR_NO_DATA, "No data"}, {NVML_ERROR_UNKNOWN, "Unknown Error"}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].r == result) return texts[i].text;
    const char *word = sim_return_text(result);
    return word ? word : "Unknown Error";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER();
    return copy_text(version, length, c.m->driver);
}

/* It needs no init (nvml.h does not list UNINITIALIZED); before the first one there is no machine to ask. */
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    ENTER_WITH(sim_enter_any);
    char text[2 * WORD];
    if (!c.m) return NVML_ERROR_UNKNOWN;
    snprintf(text, sizeof text, "%llu.%s", c.m->cuda / 1000, sim_library());
    return copy_text(version, length, *c.m->nvml ? c.m->nvml : text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    ENTER();
    NEED(version);
    *version = (int)c.m->cuda;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    ENTER();
    NEED(version);
    *version = (int)c.m->cuda;
    return NVML_SUCCESS;
}

/* ---- enumeration and lookup ---- */

/* v1 skips GPUs that cannot be reached, v2 counts them (nvml.h). */
nvmlReturn_t nvmlDeviceGetCount(unsigned int *count)
{
    ENTER();
    NEED(count);
    *count = 0;
    for (int i = 0; i < c.m->gpus; i++) *count += c.m->gpu[i].lost != 1;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER();
    NEED(count);
    *count = (unsigned)c.m->gpus;
    return NVML_SUCCESS;
}

/* A lookup concerns the GPU it finds: that GPU's faults and loss answer it. */
static nvmlReturn_t found(struct call *c, struct gpu *g, nvmlDevice_t *device)
{
    char uuid[WORD];
    memcpy(uuid, g->uuid, sizeof uuid);
    sim_occupy(c, g);
    nvmlReturn_t ret = sim_fault(c->name, (int)g->slot, uuid);
    if (!ret) ret = sim_refresh(c);
    if (ret) return ret;
    for (int i = 0; i < c->m->gpus; i++)
        if (!strcmp(c->m->gpu[i].uuid, uuid)) {
            c->gpu = &c->m->gpu[i];
            if ((ret = sim_judge(c))) return ret;
            *device = sim_gpu_handle(c->gpu);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    ENTER();
    NEED(device);
    for (int i = 0; i < c.m->gpus; i++)
        if (c.m->gpu[i].lost != 1 && !index--) return found(&c, &c.m->gpu[i], device);
    return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER();
    NEED(device);
    if (index >= (unsigned)c.m->gpus) return NVML_ERROR_INVALID_ARGUMENT;
    return found(&c, &c.m->gpu[index], device);
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER();
    NEED(uuid && device);
    for (int i = 0; i < c.m->gpus; i++) {
        struct gpu *g = &c.m->gpu[i];
        if (!strcmp(g->uuid, uuid)) return found(&c, g, device);
        for (int j = 0; g->mig == 1 && j < g->instances; j++) {
            if (strcmp(g->instance[j].uuid, uuid)) continue;
            nvmlReturn_t ret = found(&c, g, device);
            g = c.gpu;
            if (!ret && (j >= g->instances || strcmp(g->instance[j].uuid, uuid))) ret = NVML_ERROR_NOT_FOUND;
            if (!ret) *device = sim_mig_handle(g, &g->instance[j]);
            return ret;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    ENTER();
    NEED(serial && device && *serial);
    for (int i = 0; i < c.m->gpus; i++)
        if (!strcmp(c.m->gpu[i].serial, serial)) return found(&c, &c.m->gpu[i], device);
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t by_pci(struct call *c, const char *text, nvmlDevice_t *device)
{
    unsigned domain, bus, dev, function;
    NEED(text && device);
    if (sscanf(text, "%x:%x:%x.%u", &domain, &bus, &dev, &function) < 3) {
        domain = 0;
        if (sscanf(text, "%x:%x.%u", &bus, &dev, &function) < 2) return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int i = 0; i < c->m->gpus; i++) {
        struct gpu *g = &c->m->gpu[i];
        if (g->domain == domain && g->bus == bus && g->dev == dev) return found(c, g, device);
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *pciBusId, nvmlDevice_t *device)
{
    ENTER();
    return by_pci(&c, pciBusId, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *pciBusId, nvmlDevice_t *device)
{
    ENTER();
    return by_pci(&c, pciBusId, device);
}

/* ---- identity ---- */

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_GPU(device);
    char text[2 * WORD + 8];
    snprintf(text, sizeof text, c.mig ? "%s MIG %s" : "%s%s", c.gpu->name, c.mig ? c.mig->profile.name : "");
    return copy_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_GPU(device);
    return copy_text(uuid, length, c.mig ? c.mig->uuid : c.gpu->uuid);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    return copy_text(serial, length, c.gpu->serial);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    ENTER_GPU(device);
    WHOLE_GPU_ONLY();
    return copy_text(version, length, c.gpu->vbios);
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER_GPU(device);
    NEED(index);
    *index = c.mig ? c.mig->index : (unsigned)(c.gpu - c.m->gpu);
    return NVML_SUCCESS;
}

static nvmlReturn_t pci_info(struct call *c, nvmlPciInfo_t *pci, int version)
{
    NEED(pci);
    struct gpu *g = c->gpu;
    /* v1 and v2 end before busId: only v3's callers have room for it. */
    memset(pci, 0, version == 3 ? sizeof *pci : offsetof(nvmlPciInfo_t, busId));
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", g->domain & 0xffff, g->bus & 0xff, g->dev & 0xff);
    if (version == 3) snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", g->domain, g->bus, g->dev);
    pci->domain = g->domain;
    pci->bus = g->bus;
    pci->device = g->dev;
    pci->pciDeviceId = g->pci_device == UNSET ? 0 : (unsigned)g->pci_device;
    if (version > 1) pci->pciSubSystemId = g->pci_subsystem == UNSET ? 0 : (unsigned)g->pci_subsystem;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci) { ENTER_GPU(device); return pci_info(&c, pci, 1); }
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci) { ENTER_GPU(device); return pci_info(&c, pci, 2); }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) { ENTER_GPU(device); return pci_info(&c, pci, 3); }

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_t *pci)
{
    ENTER_GPU(device);
    NEED(pci);
    if (pci->version != nvmlPciInfoExt_v1) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    nvmlPciInfo_t info;
    pci_info(&c, &info, 3);
    pci->domain = info.domain;
    pci->bus = info.bus;
    pci->device = info.device;
    pci->pciDeviceId = info.pciDeviceId;
    pci->pciSubSystemId = info.pciSubSystemId;
    pci->baseClass = 0x03; /* display controller, 3D */
    pci->subClass = 0x02;
    memcpy(pci->busId, info.busId, sizeof pci->busId);
    return NVML_SUCCESS;
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *currentMode, unsigned int *pendingMode)
{
    ENTER_GPU(device);
    NEED(currentMode && pendingMode);
    WHOLE_GPU_ONLY();
    if (c.gpu->mig == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *currentMode = (unsigned)c.gpu->mig;
    *pendingMode = (unsigned)(c.gpu->mig_pending == UNSET ? c.gpu->mig : c.gpu->mig_pending);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *isMigDevice)
{
    ENTER_GPU(device);
    NEED(isMigDevice);
    *isMigDevice = c.mig != NULL;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER_GPU(device);
    NEED(count);
    WHOLE_GPU_ONLY();
    *count = c.gpu->mig == 1 ? c.gpu->max_mig == UNSET ? 7 : (unsigned)c.gpu->max_mig : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *migDevice)
{
    ENTER_GPU(device);
    NEED(migDevice && !c.mig);
    if (c.gpu->mig == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    for (int i = 0; c.gpu->mig == 1 && i < c.gpu->instances; i++)
        if (c.gpu->instance[i].index == index) {
            *migDevice = sim_mig_handle(c.gpu, &c.gpu->instance[i]);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t migDevice, nvmlDevice_t *device)
{
    ENTER_GPU(migDevice);
    NEED(device && c.mig);
    *device = sim_gpu_handle(c.gpu);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_GPU(device);
    NEED(id);
    if (!c.mig) return NVML_ERROR_NOT_SUPPORTED;
    *id = c.mig->gi;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER_GPU(device);
    NEED(id);
    if (!c.mig) return NVML_ERROR_NOT_SUPPORTED;
    *id = c.mig->ci;
    return NVML_SUCCESS;
}

static nvmlReturn_t attributes(struct call *c, nvmlDeviceAttributes_t *a)
{
    NEED(a);
    if (!c->mig) return NVML_ERROR_NOT_SUPPORTED; /* MIG handles only (nvml.h) */
    struct profile *p = &c->mig->profile;
    *a = (nvmlDeviceAttributes_t){
        .multiprocessorCount = (unsigned)p->multiprocessors, .sharedCopyEngineCount = (unsigned)p->copy_engines,
        .sharedDecoderCount = (unsigned)p->decoders, .sharedEncoderCount = (unsigned)p->encoders,
        .sharedJpegCount = (unsigned)p->jpegs, .sharedOfaCount = (unsigned)p->ofas,
        .gpuInstanceSliceCount = (unsigned)p->slices,
        .computeInstanceSliceCount = (unsigned)(p->compute_slices ? p->compute_slices : p->slices),
        .memorySizeMB = p->memory >> 20};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *a) { ENTER_GPU(device); return attributes(&c, a); }
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *a) { ENTER_GPU(device); return attributes(&c, a); }

/* The first MIG device of a GPU instance (and compute instance, unless NOWHERE). */
static struct instance *of_instance(struct gpu *g, unsigned gi, unsigned ci)
{
    for (int i = 0; g->mig == 1 && i < g->instances; i++)
        if (g->instance[i].gi == gi && (ci == NOWHERE || g->instance[i].ci == ci)) return &g->instance[i];
    return NULL;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *gpuInstance)
{
    ENTER_GPU(device);
    NEED(gpuInstance && !c.mig);
    if (c.gpu->mig != 1) return NVML_ERROR_NOT_SUPPORTED;
    if (!of_instance(c.gpu, id, NOWHERE)) return NVML_ERROR_NOT_FOUND;
    gpuInstance->handle = sim_instance_handle(c.gpu, id, NOWHERE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gpuInstance, nvmlGpuInstanceInfo_t *info)
{
    unsigned gi, ci;
    ENTER_WITH(sim_enter_instance, gpuInstance.handle, &gi, &ci);
    struct instance *mi = of_instance(c.gpu, gi, NOWHERE);
    NEED(info && mi);
    *info = (nvmlGpuInstanceInfo_t){sim_gpu_handle(c.gpu), gi, (unsigned)mi->profile.gi_profile_id,
                                    {mi->start, (unsigned)mi->profile.size}};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gpuInstance, unsigned int id, nvmlComputeInstance_t *computeInstance)
{
    unsigned gi, ci;
    ENTER_WITH(sim_enter_instance, gpuInstance.handle, &gi, &ci);
    NEED(computeInstance);
    if (!of_instance(c.gpu, gi, id)) return NVML_ERROR_NOT_FOUND;
    computeInstance->handle = sim_instance_handle(c.gpu, gi, id);
    return NVML_SUCCESS;
}

static nvmlReturn_t compute_info(struct call *c, unsigned gi, unsigned ci, nvmlComputeInstanceInfo_t *info)
{
    struct instance *mi = of_instance(c->gpu, gi, ci);
    NEED(info && mi && ci != NOWHERE);
    *info = (nvmlComputeInstanceInfo_t){.device = sim_gpu_handle(c->gpu), .id = ci,
        .profileId = (unsigned)mi->profile.ci_profile_id,
        .placement = {0, (unsigned)(mi->profile.compute_slices ? mi->profile.compute_slices : mi->profile.slices)}};
    info->gpuInstance.handle = sim_instance_handle(c->gpu, gi, NOWHERE);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t computeInstance, nvmlComputeInstanceInfo_t *info)
{
    unsigned gi, ci;
    ENTER_WITH(sim_enter_instance, computeInstance.handle, &gi, &ci);
    return compute_info(&c, gi, ci, info);
}

/* Profiles of the machine file, by NVML_GPU_INSTANCE_PROFILE_*. */
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile, nvmlGpuInstanceProfileInfo_t *info)
{
    ENTER_GPU(device);
    NEED(info && !c.mig && profile < NVML_GPU_INSTANCE_PROFILE_COUNT);
    if (c.gpu->mig == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < c.m->profiles; i++) {
        struct profile *p = &c.m->profile[i];
        if (p->gi_profile != profile) continue;
        *info = (nvmlGpuInstanceProfileInfo_t){
            .id = (unsigned)p->gi_profile_id, .sliceCount = (unsigned)p->slices, .instanceCount = (unsigned)p->max,
            .multiprocessorCount = (unsigned)p->multiprocessors, .copyEngineCount = (unsigned)p->copy_engines,
            .decoderCount = (unsigned)p->decoders, .encoderCount = (unsigned)p->encoders,
            .jpegCount = (unsigned)p->jpegs, .ofaCount = (unsigned)p->ofas, .memorySizeMB = p->memory >> 20};
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gpuInstance, unsigned int profile,
                                                          unsigned int engProfile, nvmlComputeInstanceProfileInfo_t *info)
{
    unsigned gi, ci;
    ENTER_WITH(sim_enter_instance, gpuInstance.handle, &gi, &ci);
    struct instance *mi = of_instance(c.gpu, gi, NOWHERE);
    NEED(info && mi);
    for (int i = 0; engProfile == NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED && i < c.m->profiles; i++) {
        struct profile *p = &c.m->profile[i];
        if (p->ci_profile != profile || p->gi_profile_id != mi->profile.gi_profile_id) continue;
        *info = (nvmlComputeInstanceProfileInfo_t){
            .id = (unsigned)p->ci_profile_id, .sliceCount = (unsigned)(p->compute_slices ? p->compute_slices : p->slices),
            .instanceCount = 1, .multiprocessorCount = (unsigned)p->multiprocessors,
            .sharedCopyEngineCount = (unsigned)p->copy_engines, .sharedDecoderCount = (unsigned)p->decoders,
            .sharedEncoderCount = (unsigned)p->encoders, .sharedJpegCount = (unsigned)p->jpegs,
            .sharedOfaCount = (unsigned)p->ofas};
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_SUPPORTED;
}
