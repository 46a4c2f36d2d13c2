package nvidia

import (
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// function is a function of the library, and what its calls took.
type function struct {
	found         bool // the library has it
	calls, errors atomic.Uint64
	nanoseconds   atomic.Int64
}

// count counts a call that has returned.
func (f *function) count(took time.Duration, ret nvml.Return) {
	f.calls.Add(1)
	f.nanoseconds.Add(int64(took))
	if ret != nvml.SUCCESS && !lacksValue(ret) {
		f.errors.Add(1)
	}
}

// DriverCalls returns the counters of the functions that were called since the process started, by name. It waits for no call and
// takes no lock.
func DriverCalls() []gpu.CallCount {
	library := loadedLibrary.library.Load()
	if library == nil {
		return nil
	}
	var all []gpu.CallCount
	library.calls.Range(func(name, value any) bool {
		f := value.(*function)
		if calls := f.calls.Load(); calls > 0 {
			all = append(all, gpu.CallCount{Function: name.(string), Calls: calls, Errors: f.errors.Load(), Time: time.Duration(f.nanoseconds.Load())})
		}
		return true
	})
	slices.SortFunc(all, func(a, b gpu.CallCount) int { return strings.Compare(a.Function, b.Function) })
	return all
}
