package nvidia

import (
	"errors"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// The calls about limits of device memory by control group, and those of memory.
const (
	getLimits    = "nvmlDeviceGetMemoryLimits_v1"
	setLimits    = "nvmlDeviceSetMemoryLimits_v1"
	memoryInfo   = "nvmlDeviceGetMemoryInfo"
	memoryInfoV2 = "nvmlDeviceGetMemoryInfo_v2"
)

// LimitsUnsupported is why the driver has no limits of device memory at all; "" if it may have them. The version is that of the latest Snapshot. It makes no
// call, and belongs to the reader.
func (s *Session) LimitsUnsupported() string {
	if b := gpu.Branch(s.driver.Version); b > 0 && b < gpu.LimitsBranch {
		return fmt.Sprintf("driver %s: want %d or newer", s.driver.Version, gpu.LimitsBranch)
	}
	for _, name := range []string{getLimits, setLimits} {
		if !s.library.has(name) {
			return fmt.Sprintf("driver %s lacks %s: want %d or newer", s.driver.Version, name, gpu.LimitsBranch)
		}
	}
	return ""
}

// ReadGPU reads what limits depend on of one GPU, its MIG mode and its memory, and makes no call about another: where that hangs, it returns. It stands for a Snapshot
// before the calls about limits. The library may look at others itself until it has found the UUID. It belongs to the reader.
func (s *Session) ReadGPU(id gpu.DeviceID) (gpu.Device, error) {
	if _, err := s.readDriver(); err != nil {
		return gpu.Device{}, s.driverLost(err)
	}
	newer := s.LimitsUnsupported() == ""
	known, err := query(s, target{s.worker(id), -1, gpu.WholeGPU(id)}, func(c *caller) (g knownGPU) {
		g.device = gpu.Device{ID: id, At: c.at, Index: -1}
		g.handle = required(c, "nvmlDeviceGetHandleByUUID", func() (nvml.Device, nvml.Return) { return s.lib.DeviceGetHandleByUUID(string(id)) })
		if c.err != nil {
			return g
		}
		readMIGMode(c, g.handle, &g.device)
		g.device.Memory = supported(c, memoryInfo, converted(g.handle.GetMemoryInfo, memoryTotal))
		if newer {
			readWholeMemory(c, g.handle, &g.device)
		}
		return g
	})
	switch {
	case isDriverLost(err):
		return gpu.Device{}, s.driverLost(err)
	case err != nil:
		return gpu.Device{}, err
	}
	s.gpus = append(slices.DeleteFunc(slices.Clone(s.gpus), func(g knownGPU) bool { return g.device.ID == id }), known)
	return known.device, nil
}

// MemoryLimits reads limits of device memory on the GPUs' workers: a GPU that hangs delays no other. There is an answer for each query, in their order. Only an
// error of the whole driver is returned. It belongs to the reader.
func (s *Session) MemoryLimits(queries []gpu.LimitQuery) ([]gpu.LimitAnswer, error) {
	answers := make([]gpu.LimitAnswer, len(queries))
	var gpus []knownGPU
	var places [][]int // in queries, by GPU
	unsupported := s.LimitsUnsupported() != ""
	for i, q := range queries {
		known := s.lastRead(q.GPU)
		switch {
		case unsupported:
			answers[i] = gpu.LimitAnswer{LimitQuery: q, State: gpu.NoLimit}
			continue
		case known.device.ID == "":
			answers[i] = gpu.LimitAnswer{LimitQuery: q, State: gpu.LimitFailed, Err: "the GPU was not read"}
			continue
		}
		at := slices.IndexFunc(gpus, func(g knownGPU) bool { return g.device.ID == q.GPU })
		if at < 0 {
			at, gpus, places = len(gpus), append(gpus, known), append(places, nil)
		}
		places[at] = append(places[at], i)
	}
	queries = slices.Clone(queries) // an abandoned query may read them later
	read, errs := queryAll(s, s.targetsOf(gpus), func(i int, c *caller) (read []gpu.LimitAnswer) {
		for _, place := range places[i] {
			read = append(read, readLimit(c, gpus[i].handle, queries[place]))
		}
		return read
	})
	for i, err := range errs {
		if isDriverLost(err) {
			return nil, s.driverLost(err)
		}
		for n, place := range places[i] {
			if answers[place] = (gpu.LimitAnswer{LimitQuery: queries[place], State: gpu.LimitFailed}); err != nil {
				answers[place].Err = err.Error()
			} else {
				answers[place] = read[i][n]
			}
		}
	}
	return answers, nil
}

// readLimit reads one limit. Only what ends all calls about the GPU is the caller's error.
func readLimit(c *caller, h nvml.Device, q gpu.LimitQuery) gpu.LimitAnswer {
	a := gpu.LimitAnswer{LimitQuery: q}
	limits := required(c, getLimits, func() (nvml.MemoryLimits_v1, nvml.Return) { return h.GetMemoryLimits_v1(q.Group) })
	switch err := c.err; {
	case err == nil:
		a.Limit = gpu.MemoryLimit{Soft: limits.SoftLimit, Hard: limits.HardLimit, Used: limits.CurrentUsed}
	case returnCode(err) == nvml.ERROR_NOT_FOUND, returnCode(err) == nvml.ERROR_NOT_SUPPORTED, returnCode(err) == nvml.ERROR_FUNCTION_NOT_FOUND:
		a.State, c.err = gpu.NoLimit, nil
	default:
		a.State, a.Err = gpu.LimitFailed, err.Error()
		if !endsCheck(err) {
			c.err = nil
		}
	}
	return a
}

// SetMemoryLimit sets a limit of device memory on the GPU's worker; it does not read it back. The error is one of gpu's, gpu.ErrLimitsUnsupported and so on, or
// one of the whole driver. It belongs to the reader.
func (s *Session) SetMemoryLimit(l gpu.LimitChange) error {
	if why := s.LimitsUnsupported(); why != "" {
		return fmt.Errorf("%w: %s", gpu.ErrLimitsUnsupported, why)
	}
	known := s.lastRead(l.GPU)
	if known.device.ID == "" {
		return fmt.Errorf("%w: it was not read", gpu.ErrLimitUnknown)
	}
	_, err := query(s, s.targetOf(known.device), func(c *caller) struct{} {
		c.err = do(c.slot, setLimits, c.at, func() nvml.Return { return known.handle.SetMemoryLimits_v1(l.Group, l.Soft, l.Hard) })
		return struct{}{}
	})
	if isDriverLost(err) {
		return s.driverLost(err)
	}
	return limitError(err)
}

// limitError wraps the error of a Set. Of GPUs without memory of their own memacct.c answers OBJECT_NOT_FOUND.
func limitError(err error) error {
	if err == nil {
		return nil
	}
	kind := gpu.ErrLimitUnknown
	if _, answered := errors.AsType[*nvmlError](err); answered && !isLost(err) {
		switch returnCode(err) {
		case nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NOT_FOUND:
			kind = gpu.ErrLimitsUnsupported
		case nvml.ERROR_NO_PERMISSION:
			kind = gpu.ErrLimitNotPermitted
		case nvml.ERROR_INVALID_ARGUMENT:
			kind = gpu.ErrLimitInvalid
		case nvml.ERROR_OPERATING_SYSTEM:
			kind = gpu.ErrLimitNoGroup
		default:
			return fmt.Errorf("limit of device memory not set: %w", err)
		}
	}
	return fmt.Errorf("%w: %w", kind, err)
}
