/* Field values, NVLink, topology, fabric. */
#include "sim.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- NVLink ---- */

/* The peer's index at the far end of a link, -1 for a switch, -2 when there is no such link. A GPU's links are
 * numbered peer by peer, in index order; behind switches every link ends at one. */
static int far_end(const struct call *c, unsigned link)
{
    int me = (int)(c->gpu - c->m->gpu), most = 0;
    if (c->m->switches) {
        for (int j = 0; j < c->m->gpus; j++)
            if (c->m->links[me][j] > most) most = c->m->links[me][j];
        return (int)link < most ? -1 : -2;
    }
    for (int j = 0; j < c->m->gpus; j++) {
        if (link < c->m->links[me][j]) return j;
        link -= c->m->links[me][j];
    }
    return -2;
}

static unsigned link_count(const struct call *c)
{
    unsigned n = 0;
    while (n < NVML_NVLINK_MAX_LINKS && far_end(c, n) != -2) n++;
    return n;
}

static bool link_down(const struct gpu *g, unsigned link) { return g->links_down != UNSET && g->links_down >> link & 1; }

/* What every NVLink call checks first. */
static nvmlReturn_t link_of(const struct call *c, unsigned link)
{
    if (c->mig) return NVML_ERROR_NOT_SUPPORTED;
    if (link >= NVML_NVLINK_MAX_LINKS) return NVML_ERROR_INVALID_ARGUMENT;
    return far_end(c, link) == -2 ? link_count(c) ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, nvmlEnableState_t *isActive)
{
    ENTER_GPU(device);
    NEED(isActive);
    nvmlReturn_t ret = link_of(&c, link);
    if (ret) return ret;
    *isActive = link_down(c.gpu, link) ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned int link, unsigned int *version)
{
    ENTER_GPU(device);
    NEED(version);
    nvmlReturn_t ret = link_of(&c, link);
    if (ret) return ret;
    if (c.gpu->nvlink_version == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    *version = (unsigned)c.gpu->nvlink_version;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int link, nvmlNvLinkErrorCounter_t counter, unsigned long long *value)
{
    ENTER_GPU(device);
    NEED(value && counter < NVML_NVLINK_ERROR_COUNT);
    nvmlReturn_t ret = link_of(&c, link);
    if (!ret) *value = 0;
    return ret;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, nvmlIntNvLinkDeviceType_t *type)
{
    ENTER_GPU(device);
    NEED(type);
    nvmlReturn_t ret = link_of(&c, link);
    if (!ret) *type = far_end(&c, link) == -1 ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return ret;
}

static nvmlReturn_t remote(struct call *c, unsigned link, nvmlPciInfo_t *pci, bool v2)
{
    NEED(pci);
    nvmlReturn_t ret = link_of(c, link);
    if (ret) return ret;
    if (link_down(c->gpu, link)) return NVML_ERROR_INVALID_ARGUMENT; /* nvml.h: "link is not active" is not told apart */
    int peer = far_end(c, link);
    const char *text = peer >= 0 ? c->m->gpu[peer].pci : c->m->switch_pci[link % (unsigned)c->m->switches];
    memset(pci, 0, v2 ? sizeof *pci : offsetof(nvmlPciInfo_t, busId));
    if (sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) != 3) return NVML_ERROR_NOT_SUPPORTED; /* off this node */
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    if (v2) snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    ENTER_GPU(device);
    return remote(&c, link, pci, false);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    ENTER_GPU(device);
    return remote(&c, link, pci, true);
}

/* ---- topology ---- */

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device1, nvmlDevice_t device2, nvmlGpuTopologyLevel_t *pathInfo)
{
    ENTER_GPU(device1);
    struct gpu *other = sim_handle_gpu(c.m, device2);
    NEED(pathInfo && other && !c.mig);
    if (other == c.gpu) { *pathInfo = NVML_TOPOLOGY_INTERNAL; return NVML_SUCCESS; }
    if (other->lost == 1) return NVML_ERROR_GPU_IS_LOST;
    *pathInfo = (nvmlGpuTopologyLevel_t)c.m->topology[c.gpu - c.m->gpu][other - c.m->gpu];
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device1, nvmlDevice_t device2, nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t *status)
{
    ENTER_GPU(device1);
    struct gpu *other = sim_handle_gpu(c.m, device2);
    NEED(status && other && !c.mig && index < NVML_P2P_CAPS_INDEX_UNKNOWN);
    if (other->lost == 1) return NVML_ERROR_GPU_IS_LOST;
    bool nvlink = c.m->links[c.gpu - c.m->gpu][other - c.m->gpu] > 0, mig = c.gpu->mig == 1 || other->mig == 1;
    if (mig) *status = NVML_P2P_STATUS_NOT_SUPPORTED; /* no peer access while MIG is on */
    else if (index == NVML_P2P_CAPS_INDEX_NVLINK) *status = nvlink ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
    else *status = nvlink || c.m->topology[c.gpu - c.m->gpu][other - c.m->gpu] <= NVML_TOPOLOGY_NODE
                       ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t device1, nvmlDevice_t device2, int *onSameBoard)
{
    ENTER_GPU(device1);
    struct gpu *other = sim_handle_gpu(c.m, device2);
    NEED(onSameBoard && other && !c.mig);
    *onSameBoard = c.gpu->board_id != UNSET && c.gpu->board_id == other->board_id;
    return NVML_SUCCESS;
}

/* ---- fabric ---- */

/* 16 bytes from a UUID's hex digits. */
void sim_cluster_bytes(const char *text, unsigned char *out)
{
    memset(out, 0, NVML_GPU_FABRIC_UUID_LEN);
    for (int n = 0; *text && n < 2 * NVML_GPU_FABRIC_UUID_LEN; text++) {
        int d = *text >= '0' && *text <= '9' ? *text - '0' : *text >= 'a' && *text <= 'f' ? *text - 'a' + 10 : -1;
        if (d < 0) continue;
        out[n / 2] |= (unsigned char)(n % 2 ? d : d << 4);
        n++;
    }
}

#define FABRIC(info)                                                                                     \
    do {                                                                                                 \
        sim_cluster_bytes(c.gpu->fabric_cluster, (info)->clusterUuid);                                       \
        (info)->status = c.gpu->fabric_status == UNSET ? NVML_SUCCESS : (nvmlReturn_t)c.gpu->fabric_status; \
        (info)->cliqueId = c.gpu->fabric_clique == UNSET ? 0 : (unsigned)c.gpu->fabric_clique;           \
        (info)->state = (nvmlGpuFabricState_t)c.gpu->fabric_state;                                       \
    } while (0)

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *info)
{
    ENTER_GPU(device);
    NEED(info);
    if (c.mig || c.gpu->fabric_state == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    FABRIC(info);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    ENTER_GPU(device);
    NEED(info);
    bool old = c.gpu->fabric_version != UNSET && c.gpu->fabric_version < 3;
    if (info->version != nvmlGpuFabricInfo_v2 && (old || info->version != nvmlGpuFabricInfo_v3)) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (c.mig || c.gpu->fabric_state == UNSET) return NVML_ERROR_NOT_SUPPORTED;
    FABRIC(info);
    info->healthMask = c.gpu->fabric_health_mask == UNSET ? 0 : (unsigned)c.gpu->fabric_health_mask;
    if (info->version == nvmlGpuFabricInfo_v3)
        info->healthSummary = c.gpu->fabric_health_summary == UNSET ? 0 : (unsigned char)c.gpu->fabric_health_summary;
    return NVML_SUCCESS;
}

/* ---- fields ---- */

enum { UI = NVML_VALUE_TYPE_UNSIGNED_INT, ULL = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG };

#define F(id, type, key) {id, type, offsetof(struct gpu, key)}
static const struct { unsigned id; int type; size_t at; } known[] = {
    F(NVML_FI_DEV_ECC_CURRENT, UI, ecc), F(NVML_FI_DEV_ECC_PENDING, UI, ecc_pending),
    F(NVML_FI_DEV_ECC_SBE_VOL_TOTAL, ULL, ecc_corrected_volatile),
    F(NVML_FI_DEV_ECC_DBE_VOL_TOTAL, ULL, ecc_uncorrected_volatile),
    F(NVML_FI_DEV_ECC_SBE_AGG_TOTAL, ULL, ecc_corrected_aggregate),
    F(NVML_FI_DEV_ECC_DBE_AGG_TOTAL, ULL, ecc_uncorrected_aggregate),
    F(NVML_FI_DEV_RETIRED_SBE, ULL, retired_sbe), F(NVML_FI_DEV_RETIRED_DBE, ULL, retired_dbe),
    F(NVML_FI_DEV_RETIRED_PENDING, UI, retired_pending),
    F(NVML_FI_DEV_PERF_POLICY_POWER, ULL, sw_power_cap_ns), F(NVML_FI_DEV_PERF_POLICY_RELIABILITY, ULL, reliability_ns),
    F(NVML_FI_DEV_MEMORY_TEMP, UI, memory_temperature), F(NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, ULL, energy),
    F(NVML_FI_DEV_ENERGY, ULL, energy), F(NVML_FI_DEV_PCIE_REPLAY_COUNTER, UI, pcie_replays),
    F(NVML_FI_DEV_REMAPPED_COR, UI, remapped_correctable), F(NVML_FI_DEV_REMAPPED_UNC, UI, remapped_uncorrectable),
    F(NVML_FI_DEV_REMAPPED_PENDING, UI, remapped_pending), F(NVML_FI_DEV_REMAPPED_FAILURE, UI, remapped_failed),
    F(NVML_FI_DEV_C2C_LINK_COUNT, UI, c2c_links),
    F(NVML_FI_DEV_POWER_AVERAGE, UI, power_usage), F(NVML_FI_DEV_POWER_INSTANT, UI, power_usage),
    F(NVML_FI_DEV_POWER_MIN_LIMIT, UI, power_limit_min), F(NVML_FI_DEV_POWER_MAX_LIMIT, UI, power_limit_max),
    F(NVML_FI_DEV_POWER_DEFAULT_LIMIT, UI, power_limit_default), F(NVML_FI_DEV_POWER_CURRENT_LIMIT, UI, power_limit),
    F(NVML_FI_DEV_POWER_REQUESTED_LIMIT, UI, power_limit),
    F(NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, UI, recovery_action),
    F(NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN, ULL, sw_thermal_slowdown_ns),
    F(NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN, ULL, hw_thermal_slowdown_ns),
    F(NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN, ULL, hw_power_brake_ns),
    F(NVML_FI_DEV_PCIE_COUNT_TX_BYTES, ULL, pcie_tx_bytes), F(NVML_FI_DEV_PCIE_COUNT_RX_BYTES, ULL, pcie_rx_bytes),
    F(NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, ULL, nvlink_crc_errors),
    F(NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, ULL, nvlink_replays),
    F(NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, ULL, nvlink_recoveries),
    /* Of one link they are not simulated: see one_field. */
    F(NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ULL, nvlink_tx_kib), F(NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ULL, nvlink_rx_kib),
};

/* Fields about links: scopeId is the link. */
static bool link_field(const struct call *c, nvmlFieldValue_t *v)
{
    switch (v->fieldId) {
    case NVML_FI_DEV_NVLINK_LINK_COUNT: v->value.uiVal = link_count(c); break;
    case NVML_FI_DEV_NVSWITCH_CONNECTED_LINK_COUNT: v->value.uiVal = c->m->switches ? link_count(c) : 0; break;
    case NVML_FI_DEV_NVLINK_GET_STATE: case NVML_FI_DEV_NVLINK_GET_SPEED: case NVML_FI_DEV_NVLINK_GET_VERSION:
        v->nvmlReturn = link_of(c, v->scopeId);
        if (v->nvmlReturn) break;
        if (v->fieldId == NVML_FI_DEV_NVLINK_GET_STATE) { v->value.uiVal = !link_down(c->gpu, v->scopeId); break; }
        u64 n = v->fieldId == NVML_FI_DEV_NVLINK_GET_SPEED ? c->gpu->nvlink_speed : c->gpu->nvlink_version;
        if (n == UNSET) v->nvmlReturn = NVML_ERROR_NOT_SUPPORTED; else v->value.uiVal = (unsigned)n;
        break;
    default: return false;
    }
    v->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    return true;
}

static void one_field(const struct call *c, nvmlFieldValue_t *v)
{
    struct gpu *g = c->gpu;
    int type = ULL;
    u64 n = UNSET;
    v->nvmlReturn = NVML_SUCCESS;
    memset(&v->value, 0, sizeof v->value);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].id == v->fieldId) { type = known[i].type; n = *(u64 *)((char *)g + known[i].at); }
    bool remapping = v->fieldId >= NVML_FI_DEV_REMAPPED_COR && v->fieldId <= NVML_FI_DEV_REMAPPED_FAILURE;
    bool throughput = v->fieldId == NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX || v->fieldId == NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX;
    if (throughput && v->scopeId != UINT_MAX) n = UNSET;
    if (c->mig || (remapping && g->mig == 1 && g->instances)) n = UNSET; /* as for nvmlDeviceGetRemappedRows */
    bool set = false;
    for (int i = 0; i < g->fields; i++) /* field.N lines win */
        if (g->field[i].id == v->fieldId && g->field[i].scope == v->scopeId) {
            set = true;
            n = g->field[i].value;
            v->nvmlReturn = g->field[i].ret;
        }
    if (!set && link_field(c, v)) return;
    v->valueType = (nvmlValueType_t)type;
    if (v->nvmlReturn) return;
    if (n == UNSET) v->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    else if (type == UI) v->value.uiVal = (unsigned)n;
    else v->value.ullVal = n;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int valuesCount, nvmlFieldValue_t *values)
{
    ENTER_GPU(device);
    NEED(values && valuesCount > 0);
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    for (int i = 0; i < valuesCount; i++) {
        values[i].timestamp = t.tv_sec * 1000000LL + t.tv_nsec / 1000;
        values[i].latencyUsec = 1;
        one_field(&c, &values[i]);
    }
    return NVML_SUCCESS;
}
