package policy

import (
	"math"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// readRange reads {min: 40GiB, max: 80GiB}.
func readRange(v value) inventory.Range {
	f := fieldsOf(v, rangeKeys)
	if v.IsMapping() && len(v.Pairs()) == 0 {
		v.Failf("want {min: 40GiB}, {max: 80GiB} or both")
	}
	r := inventory.Range{Min: readSize(f.At("min")), Max: readSize(f.At("max"))}
	if r.Max > 0 && r.Min > r.Max {
		f.At("min").Failf("want no more than max, which is %s", f.At("max").Text())
	}
	return r
}

// maxMemory limits sizes, in bytes: 16 TiB. NVIDIA's largest device has 288 GiB.
const maxMemory = 16 << 40

// readSize reads an amount of memory in bytes; 0 if it is absent or a problem. The units are those of NVML and nvidia-smi;
// decimal units such as 40GB are refused because they are ambiguous.
func readSize(v value) uint64 {
	if !v.Given() {
		return 0
	}
	text, ok := v.Scalar()
	for i, unit := range []string{"KiB", "MiB", "GiB", "TiB"} {
		number, hasUnit := strings.CutSuffix(text, unit)
		if !hasUnit {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
		bytes := math.Ldexp(n, 10*(i+1))
		if err == nil && isDecimal(number) && bytes >= 1<<20 && bytes <= maxMemory {
			return uint64(bytes)
		}
	}
	if ok {
		v.Failf("want a size such as 512MiB or 40GiB (KiB, MiB, GiB, TiB), from 1MiB to 16TiB")
	}
	return 0
}

// isDecimal refuses other numbers of strconv: 1e3, 0x1p4, Inf.
func isDecimal(number string) bool {
	return !strings.ContainsFunc(strings.TrimSpace(number), func(r rune) bool { return (r < '0' || r > '9') && r != '.' })
}

const (
	// maxReplicas limits the list of the units of 16 GPUs, some 100 bytes each, to one gRPC message (4 MiB).
	maxReplicas = 1000

	// maxThreads is all threads of a GPU, in percent.
	maxThreads = 100

	// maxClients is the limit of an MPS server for one GPU (nvidia-cuda-mps-control(1), from compute capability 7.0).
	maxClients = 48
)

// readReplicas reads the number of units of a shared device.
func readReplicas(v value, mode inventory.SharingMode) int {
	if mode == inventory.MPS {
		return v.Int(2, maxClients, "2 or more, up to 48 (so many clients fit an MPS server)")
	}
	return v.Int(2, maxReplicas, "2 or more, up to 1000 (so many units of 16 GPUs fit one message to the orchestrator)")
}

// checkOnePerRequest refuses failRequestsGreaterThanOne: false for MPS.
func checkOnePerRequest(v value) {
	if v.Given() && !v.Bool(true) && v.Text() == "false" {
		v.Failf("want true, or leave it out: two shares by MPS are not more of a GPU than one")
	}
}
