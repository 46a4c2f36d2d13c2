package ownership

import (
	"cmp"
	"log/slog"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// logMoves logs what has changed from one decision to the next: the API that has a GPU, and what a GPU that takes no new work waits for.
// A process has no decision before its first one, so it logs the GPUs that move when it starts, and not where the others are.
func logMoves(log *slog.Logger, was, is []Status) {
	for _, st := range is {
		before, known := statusOf(was, st.GPU)
		if known && before.API != "" && before.API != st.API {
			log.Info("GPU changed its API", "id", st.GPU, "from", before.API, "to", st.API)
		}
		waits := cmp.Or(st.Waits, "the settle time")
		switch {
		case !cordoned(st) || known && cordoned(before) && before.API == st.API && before.Target == st.Target && before.Waits == st.Waits:
		case st.API == st.Target:
			log.Info("GPU has moved and is not given out yet", "id", st.GPU, "to", st.Target, "waits_for", waits)
		default:
			log.Info("GPU moves", "id", st.GPU, "from", st.API, "to", st.Target, "waits_for", waits)
		}
	}
}

func statusOf(all []Status, id gpu.DeviceID) (Status, bool) {
	if i := slices.IndexFunc(all, func(st Status) bool { return st.GPU == id }); i >= 0 {
		return all[i], true
	}
	return Status{}, false
}

// cordoned reports whether this agent has a GPU that takes no new work, as it moves.
func cordoned(st Status) bool { return st.Local && st.Pending != "" }
