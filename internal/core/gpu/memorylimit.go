package gpu

import "errors"

// NoMemoryLimit as a hard limit means that a control group has none of its own: "maximum value" of nvmlSetMemoryLimits_v1_t in nvml.h.
const NoMemoryLimit uint64 = 1<<64 - 1

// LimitsBranch is the first branch of the driver that has limits of device memory. It is a short-lived one.
const LimitsBranch = 615

// MiB is the unit of limits, in bytes: NVIDIA's hook takes whole numbers of it only.
const MiB = 1 << 20

// WholeMiB returns a size in bytes rounded down to the unit of limits.
func WholeMiB(bytes uint64) uint64 { return bytes / MiB * MiB }

// MemoryLimit is how much memory of one GPU the processes of a control group may allocate, and have allocated, in bytes: what nvmlDeviceGetMemoryLimits_v1
// returns. An allocation beyond Hard fails (CUDA: out of memory). With the backend misc the values may be those of an ancestor of the group, with its use.
type MemoryLimit struct{ Soft, Hard, Used uint64 }

// LimitQuery asks for the memory limit of a control group on a GPU.
type LimitQuery struct {
	GPU   DeviceID // a full GPU
	Group string   // path of the group as the driver's library opens it: "/sys/fs/cgroup/nomad.slice/share.slice/ALLOC.TASK.scope"
}

// LimitAnswer is what the driver returned for a query.
type LimitAnswer struct {
	LimitQuery
	Limit MemoryLimit
	State LimitState
	Err   string // of LimitFailed: the call and its error
}

// LimitState is what the answer to a query is.
type LimitState uint8

// The states of an answer.
const (
	LimitRead   LimitState = iota // Limit has the values
	NoLimit                       // NVML_ERROR_NOT_FOUND or NOT_SUPPORTED: no limit, here or above, or the driver has none
	LimitFailed                   // see Err; nothing is known
)

// LimitChange sets the memory limit of a control group on a GPU (nvmlDeviceSetMemoryLimits_v1). Soft 0 and Hard NoMemoryLimit end it.
type LimitChange struct {
	LimitQuery
	Soft, Hard uint64
}

// Why a limit of device memory was not set. Each is wrapped with the call and its error.
var (
	// ErrLimitsUnsupported means that the driver has no limits, or none for this GPU or for this group: the root group, NVML_ERROR_NOT_SUPPORTED.
	ErrLimitsUnsupported = errors.New("limits of device memory are not supported")

	// ErrLimitNotPermitted means that this process may not set limits: NVML_ERROR_NO_PERMISSION.
	ErrLimitNotPermitted = errors.New("no permission to set limits of device memory")

	// ErrLimitInvalid means that the driver refuses the values: below what the group has allocated (backend misc), beyond the memory of the GPU, or soft above
	// hard: NVML_ERROR_INVALID_ARGUMENT.
	ErrLimitInvalid = errors.New("limit of device memory refused")

	// ErrLimitNoGroup means that the control group can't be opened, for example because it has ended: NVML_ERROR_OPERATING_SYSTEM.
	ErrLimitNoGroup = errors.New("control group can't be opened")

	// ErrLimitUnknown means that the GPU was not read by the driver, or does not answer. If it did not answer, the limit may still be set when it does.
	ErrLimitUnknown = errors.New("the GPU does not answer")
)
