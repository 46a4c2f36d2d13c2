package cudaproof

import (
	"fmt"
	"strings"
)

// device is a GPU, or a MIG instance.
type device struct {
	id              int // of the driver
	name, uuid      string
	multiprocessors int
	computeMode     int
	major, minor    int // compute capability
}

// Variables with the GPU of a process: the CUDA driver's own, and that of NVIDIA's container runtime.
const (
	visibleToCUDA    = "CUDA_VISIBLE_DEVICES"
	visibleInRuntime = "NVIDIA_VISIBLE_DEVICES"
)

// isUUID reports whether a text is a UUID of a GPU or MIG instance, or the beginning of one.
func isUUID(text string) bool {
	return strings.HasPrefix(text, "GPU-") || strings.HasPrefix(text, "MIG-")
}

// Choose returns the GPU that a process is to prove: the one that is given, or that of its environment; "" is the one that the driver shows, if it
// shows one. CUDA_VISIBLE_DEVICES may also have an index of the driver's own order.
func Choose(given string, getenv func(string) string) (string, error) {
	if given != "" && (!isUUID(given) || strings.Contains(given, ",")) {
		return "", fmt.Errorf("--gpu = %q: want one UUID, such as nvidia-smi -L lists", given)
	}
	if given != "" {
		return given, nil
	}
	inCUDA, inRuntime := getenv(visibleToCUDA), getenv(visibleInRuntime)
	if !isUUID(inRuntime) {
		inRuntime = "" // "all", "none", "void", indices: for the container runtime, which has done what they ask for
	}
	for name, value := range map[string]string{visibleToCUDA: inCUDA, visibleInRuntime: inRuntime} {
		if strings.Contains(value, ",") {
			return "", fmt.Errorf("%s = %q: want one GPU, here or by --gpu", name, value)
		}
	}
	if isUUID(inCUDA) && inRuntime != "" && inCUDA != inRuntime {
		return "", fmt.Errorf("%s = %q and %s = %q are two GPUs: want one, or --gpu", visibleToCUDA, inCUDA, visibleInRuntime, inRuntime)
	}
	if inCUDA != "" {
		return inCUDA, nil
	}
	return inRuntime, nil
}

// prohibited is the compute mode of a GPU on which no process can make a context.
const prohibited = 2

// find returns the GPU, which must be the only one that the process sees, and the one that was asked for.
func (d *driver) find(wanted string) (device, error) {
	n, err := d.count()
	switch {
	case err != nil:
		return device{}, err
	case n == 0:
		return device{}, fmt.Errorf("the CUDA driver shows no GPU: %s", missingRightsOrDevices)
	case n > 1:
		return device{}, fmt.Errorf("the CUDA driver shows %d GPUs: want one by --gpu or %s", n, visibleToCUDA)
	}
	g, err := d.device()
	if err != nil {
		return g, err
	}
	kind := "GPU-"
	if isUUID(wanted) {
		kind = wanted[:len(kind)]
	}
	g.uuid = kind + g.uuid
	if isUUID(wanted) && !strings.HasPrefix(g.uuid, kind+strings.ToLower(wanted[len(kind):])) {
		return g, fmt.Errorf("the CUDA driver shows %s in place of %s", g.uuid, wanted)
	}
	if g.computeMode == prohibited {
		return g, fmt.Errorf("the compute mode of %s is prohibited: nvidia-smi -c DEFAULT allows processes", g.name)
	}
	return g, nil
}
