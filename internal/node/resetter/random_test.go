package resetter_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/reset"
	"github.com/tandem-gpu/tandem/internal/node/gpureset"
	"github.com/tandem-gpu/tandem/internal/node/resetter"
)

func newRandom(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// random makes some of what keeps a GPU from being reset.
func (w *world) random(r *rand.Rand) {
	sometimes := func(do func()) {
		if r.IntN(12) == 0 {
			do()
		}
	}
	sometimes(func() { w.seen.Paused = "maintenance" })
	sometimes(func() { w.seen.Cannot = "no state directory" })
	sometimes(func() { w.readyErr = errors.New("nvidia-smi is missing") })
	sometimes(func() { _ = os.WriteFile(w.file, []byte("{"), 0o600) })
	for i := range w.seen.GPUs {
		g := &w.seen.GPUs[i]
		sometimes(func() { g.MIG = true })
		sometimes(func() { g.Moving = "to dra" })
		sometimes(func() { g.Unread = "it is not read yet" })
		sometimes(func() { g.Holders = []string{"pod default/train"} })
		sometimes(func() { g.Processes = []string{"pid 7"} })
		sometimes(func() { w.clients[g.ID] = []gpureset.Client{{PID: 7, Name: fmt.Sprint("p", i)}} })
		sometimes(func() { g.TakesWork, g.Cause, g.Action = true, "", 1 })
	}
	sometimes(func() {
		w.seen.GPUs[0].Group, w.seen.GPUs[1].Group = []gpu.DeviceID{"GPU-2"}, []gpu.DeviceID{"GPU-1"}
		w.seen.GPUs[0].NVSwitch = r.IntN(2) == 0
	})
}

// samePlan reports whether two plans have the same GPUs, and are kept by the same.
func samePlan(a, b resetter.Plan) bool {
	return a.GPU == b.GPU && slices.Equal(a.With, b.With) && slices.EqualFunc(a.Keeps, b.Keeps, func(x, y reset.Wait) bool { return x == y })
}
