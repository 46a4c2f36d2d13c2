package metrics

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
)

// seriesOf are the series of a scrape whose names have a prefix: "passed 0" = 1.
func seriesOf(t *testing.T, s Source, prefix string) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(Collector(func() Source { return s }))
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]float64{}
	for _, f := range families {
		name, ok := strings.CutPrefix(f.GetName(), prefix)
		for _, m := range f.GetMetric() {
			if !ok {
				continue
			}
			key := name
			for _, l := range m.GetLabel() {
				key += " " + strings.TrimPrefix(l.GetValue(), "GPU-00000000-0000-4000-8000-00000000000")
			}
			all[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return all
}

// case 20: values of a proof are series until the GPU is not listed any more; a GPU without a result has none of one, a node without proofs has none at all.
func TestProofs(t *testing.T) {
	cfg, at := core.DefaultConfig(), time.Unix(1000, 0)
	policy := proof.Default()
	policy.Command = []string{"/check"}
	node := proof.Node{Name: "n", GPUs: []proof.GPU{{ID: coretest.GPU(0)}, {ID: coretest.GPU(1)}, {ID: coretest.GPU(2)}}}
	state := policy.Next(proof.State{}, node, at).State
	values := map[string]float64{"gemm_tflops": 612.3, "bad name\n": 1}
	for i := range 100 {
		values[fmt.Sprint("zz_", i)] = 1
	}
	for i := range 2 { // GPU 0 passes, and is proved again; the check of GPU 1 could not run
		r := &state.Records[i]
		r.Running = &proof.Running{Number: uint64(i), Reason: proof.Boot, Began: at}
		end := proof.End{GPU: r.GPU, Number: uint64(i), Outcome: []proof.Outcome{proof.Passed, proof.NotRun}[i], Took: 5 * time.Second, Values: values}
		if state, _ = state.Ended(end, at); i == 0 {
			state.Records[0].Running = &proof.Running{Number: 9, Reason: proof.Idle, Began: at, Runs: at}
		}
	}
	of := func(gpus int) Source {
		return Source{Config: cfg, State: core.NewState(cfg).Read(cfg, at, coretest.GPUs(gpus)), Proofs: &proof.Result{State: state},
			Sources: map[string]bool{}, ResourceOf: func(u inventory.Unit) string { return u.Pool }}
	}
	got := seriesOf(t, of(2), "tandem_prove_")
	bounded := 0
	maps.DeleteFunc(got, func(key string, _ float64) bool {
		extra := strings.Contains(key, " zz_")
		if extra {
			bounded++
		}
		return extra
	})
	want := map[string]float64{
		"running 0": 1, "could_not_run 0": 0, "passed 0": 1, "timestamp_seconds 0": 1000, "duration_seconds 0": 5, "value 0 gemm_tflops": 612.3,
		"running 1": 0, "could_not_run 1": 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want, +got):\n%s", diff)
	}
	if bounded != 31 {
		t.Errorf("%d values beside the first", bounded)
	}
	if got := seriesOf(t, of(0), "tandem_prove_"); len(got) != 0 {
		t.Errorf("the GPUs are gone: %v", slices.Sorted(maps.Keys(got)))
	}
	off := of(2)
	off.Proofs = nil
	if got := seriesOf(t, off, "tandem_prove_"); len(got) != 0 {
		t.Errorf("nothing is proved: %v", slices.Sorted(maps.Keys(got)))
	}
}
