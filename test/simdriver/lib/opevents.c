/* Operational events, and the other calls that drivers have from 615 on. A line of the file `events`:
 *
 *   SEQ operational UUID module=M severity=N level=N code=N attributes=N group_attributes=N group=N [context] [xid=N]...
 *
 * Each word but UUID may be missing; numbers are decimal or 0x hex. "context" is a context record of no public type, "xid=N" one with a
 * legacy XID. No such driver was seen yet: what nvml.h 13.4 leaves open is chosen here. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool sim_since(unsigned branch) { return strtoul(sim_library(), NULL, 10) >= branch; }

static void operational_word(struct operational *o, const char *word)
{
    const struct { const char *key; u64 *to; } numbers[] = {
        {"severity=", &o->severity}, {"level=", &o->level}, {"code=", &o->code}, {"attributes=", &o->attributes},
        {"group_attributes=", &o->group_attributes}, {"group=", &o->group}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strncmp(word, numbers[i].key, strlen(numbers[i].key))) { sim_text_number(word + strlen(numbers[i].key), numbers[i].to); return; }
    if (!strncmp(word, "module=", 7)) { memcpy(o->module, word + 7, strnlen(word + 7, sizeof o->module)); return; }
    bool xid = !strncmp(word, "xid=", 4);
    if ((!xid && strcmp(word, "context")) || o->contexts == MAX_CONTEXTS) return;
    o->xid[o->contexts] = UNSET;
    if (xid) sim_text_number(word + 4, &o->xid[o->contexts]);
    o->contexts++;
}

bool sim_parse_operational(const char *line, struct operational *o)
{
    char text[512], *rest;
    snprintf(text, sizeof text, "%s", line);
    *o = (struct operational){0};
    char *word = strtok_r(text, " ", &rest);
    if (!word || !(word = strtok_r(NULL, " ", &rest)) || strcmp(word, "operational")) return false;
    if (!(word = strtok_r(NULL, " ", &rest))) return false;
    snprintf(o->uuid, sizeof o->uuid, "%s", word);
    while ((word = strtok_r(NULL, " ", &rest))) operational_word(o, word);
    return true;
}

/* A subscription concerns the GPU of its UUID: that GPU's faults and loss answer it. */
nvmlReturn_t nvmlEventSetRegisterGpuOperationalEvents_v1(nvmlEventSet_t set, const nvmlGpuOperationalEventConfig_v1_t *config)
{
    SINCE(615);
    struct set *in_use __attribute__((cleanup(sim_end_use))) = sim_begin_use(set.handle);
    ENTER();
    NEED(config && memchr(config->uuid, 0, sizeof config->uuid));
    for (int i = 0; i < c.m->gpus; i++) {
        if (strcmp(c.m->gpu[i].uuid, config->uuid)) continue;
        c.gpu = &c.m->gpu[i];
        sim_occupy(&c, c.gpu);
        nvmlReturn_t ret = sim_fault(c.name, (int)c.gpu->slot, c.gpu->uuid);
        if (ret || (ret = sim_judge(&c))) return ret;
        if (c.gpu->operational_events != 1) return NVML_ERROR_NOT_SUPPORTED;
        return sim_register_operational(c.name, set.handle, config->uuid, config->minLogLevel, config->minSeverity);
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvmlEventSetWait_v3(nvmlEventSet_t set, nvmlEventSetWait_v3_t *params)
{
    SINCE(615);
    ENTER_WITH(sim_enter_free);
    NEED(params);
    struct event e;
    nvmlReturn_t ret = sim_event_wait(&c, __func__, set.handle, params->timeoutMs, true, &e);
    if (ret) return ret;
    *params = (nvmlEventSetWait_v3_t){.timeoutMs = params->timeoutMs, .gpuInstanceId = e.gi, .computeInstanceId = e.ci};
    snprintf(params->uuid, sizeof params->uuid, "%s", e.uuid);
    if (!e.structured) {
        params->dataType = NVML_EVENT_DATA_TYPE_NVML_EVENT;
        params->eventType = e.type;
        params->eventData = e.data;
        return NVML_SUCCESS;
    }
    struct operational *o = &e.operational;
    params->dataType = NVML_EVENT_DATA_TYPE_GPU_OPERATIONAL_EVENT;
    memcpy(params->sourceModule, o->module, sizeof params->sourceModule);
    params->severity = (unsigned)o->severity;
    params->logLevel = (unsigned)o->level;
    params->moduleEventCode = (unsigned)o->code;
    params->attributes = (unsigned)o->attributes;
    params->groupAttributes = (unsigned)o->group_attributes;
    params->groupCursor = o->group;
    params->groupSize = 1;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetGetContextCount_v1(nvmlEventSet_t set, nvmlEventSetGetContextCount_v1_t *params)
{
    SINCE(615);
    ENTER();
    NEED(params);
    struct operational last;
    nvmlReturn_t ret = sim_last_operational(__func__, set.handle, &last);
    if (!ret) params->count = (unsigned)last.contexts;
    return ret;
}

nvmlReturn_t nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(nvmlEventSet_t set,
                                                                   nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1_t *params)
{
    SINCE(615);
    ENTER();
    NEED(params);
    struct operational last;
    nvmlReturn_t ret = sim_last_operational(__func__, set.handle, &last);
    if (ret) return ret;
    if (params->index >= (unsigned)last.contexts) return NVML_ERROR_INVALID_ARGUMENT;
    if (last.xid[params->index] == UNSET) return NVML_ERROR_NOT_FOUND;
    params->xidCode = (unsigned)last.xid[params->index];
    return NVML_SUCCESS;
}

static unsigned or_zero(u64 n) { return n == UNSET ? 0 : (unsigned)n; }

nvmlReturn_t nvmlDeviceGetBankRemapperStatus_v1(nvmlDevice_t device, nvmlEccBankRemapperStatus_v1_t *status)
{
    SINCE(615);
    ENTER_GPU(device);
    NEED(status);
    WHOLE_GPU_ONLY();
    struct gpu *g = c.gpu;
    if (g->bank_remap_pending == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *status = (nvmlEccBankRemapperStatus_v1_t){
        .activeRemappings = or_zero(g->bank_remaps), .inactiveRemappings = or_zero(g->bank_remaps_inactive),
        .bPending = (unsigned)g->bank_remap_pending,
        .histogram = {.maxSpareGroupCount = or_zero(g->bank_spare_max), .noSpareGroupCount = or_zero(g->bank_spare_none)}};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo_v4(nvmlDevice_t device, nvmlGpuFabricInfo_v4_t *info)
{
    SINCE(615);
    ENTER_GPU(device);
    NEED(info);
    WHOLE_GPU_ONLY();
    struct gpu *g = c.gpu;
    if (g->fabric_state == UNSET || (g->fabric_version != UNSET && g->fabric_version < 4)) return NVML_ERROR_NOT_SUPPORTED;
    *info = (nvmlGpuFabricInfo_v4_t){
        .status = g->fabric_status == UNSET ? NVML_SUCCESS : (nvmlReturn_t)g->fabric_status,
        .state = (nvmlGpuFabricState_t)g->fabric_state,
        .healthMask = or_zero(g->fabric_health_mask), .healthSummary = (unsigned char)or_zero(g->fabric_health_summary)};
    sim_cluster_bytes(g->fabric_cluster, info->clusterUuid);
    u64 types = g->fabric_clique_types == UNSET ? 1 << NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER | 1 << NVML_GPU_FABRIC_CLIQUE_TYPE_MULTICAST_POINTER
                                                : g->fabric_clique_types;
    for (unsigned type = 0; type < 8; type++)
        if (types >> type & 1) info->cliques[info->numCliques++] = (nvmlGpuFabricClique_v1_t){(unsigned char)type, or_zero(g->fabric_clique) + type};
    return NVML_SUCCESS;
}
