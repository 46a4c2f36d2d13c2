package ownership_test

import (
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
)

// step is what an agent sees at a time, of one GPU, and what it decides.
type step struct {
	at       time.Duration
	holders  string        // "" = none
	unknown  bool          // the record is not known
	age      time.Duration // of the record
	reserved bool          // the GPU was given out since the step before
	overlap  *ownership.Overlap
	runs     bool   // nomad-gpu
	other    string // has another GPU
	before   string // had the GPU at some time, and whether it still does is never known
	force    bool   // the operator forces the move now
	restart  bool   // of the process, before the step
	forced   bool   // the entry still is afterwards
	want     string // "dra", "dra, moves to nomad", "elsewhere: nomad"
	waits    string // contained in Status.Waits
	health   string // want, in full; "" = want only
}

const one = gpu.DeviceID("GPU-1")

// What a move waits for, step by step, as the agent of the kubelet sees it.
func TestNext(t *testing.T) {
	nomad := ownership.Overlap{Agent: "nomad-gpu", Running: true}
	away := ownership.Overlap{Agent: "nomad-gpu"}
	const s, moves = time.Second, "device-plugin, moves to nomad"
	leaves := ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.Nomad}
	for name, tc := range map[string]struct {
		entry ownership.Entry
		steps []step
	}{
		"nothing holds it": {leaves, []step{
			{at: 0, want: moves}, {at: 1 * s, want: moves}, {at: 30 * s, want: moves}, {at: 31 * s, want: "elsewhere: nomad"},
		}},
		"a short settle time": {ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.Nomad, Settle: 2 * s}, []step{
			{at: 0, want: moves}, {at: 1 * s, want: moves}, {at: 3 * s, want: "elsewhere: nomad"},
		}},
		"a holder, and one that comes in the settle time": {leaves, []step{
			{at: 0, holders: "pod default/a", want: moves, waits: "the end of pod default/a"}, {at: 50 * s, want: moves}, {at: 60 * s, holders: "pod default/b", want: moves},
			{at: 61 * s, want: moves}, {at: 90 * s, want: moves}, {at: 91 * s, want: "elsewhere: nomad"},
		}},
		"given out in the settle time, and not in the record so far": {leaves, []step{
			{at: 0, want: moves}, {at: 1 * s, want: moves}, {at: 20 * s, reserved: true, want: moves}, {at: 40 * s, want: moves}, {at: 50 * s, want: "elsewhere: nomad"},
		}},
		"one record read again and again, with work on another GPU": {ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.Nomad, Settle: 2 * s}, []step{
			{at: 0, age: 1 * s, other: "pod default/b", want: moves}, {at: 1 * s, age: 2 * s, other: "pod default/b", want: moves},
			{at: 2 * s, age: 3 * s, other: "pod default/b", want: moves}, {at: 3 * s, age: 4 * s, other: "pod default/b", want: "elsewhere: nomad"},
		}},
		"an older record than one before, with work on another GPU": {ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.Nomad, Settle: 2 * s}, []step{
			{at: 0, age: 1 * s, other: "pod default/b", want: moves}, {at: 1 * s, age: 3 * s, other: "pod default/b", want: moves},
			{at: 3 * s, age: 5 * s, other: "pod default/b", want: moves}, {at: 5 * s, other: "pod default/b", want: moves},
			{at: 8 * s, other: "pod default/b", want: "elsewhere: nomad"},
		}},
		"given out after the record was read": {ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.Nomad, Settle: 2 * s}, []step{
			{at: 0, want: moves}, {at: 1 * s, want: moves}, {at: 2 * s, reserved: true, want: moves}, {at: 5 * s, age: 4 * s, want: moves},
			{at: 30 * s, age: 28 * s, want: moves}, {at: 31 * s, age: 4 * s, want: moves}, {at: 33 * s, age: 6 * s, want: "elsewhere: nomad"},
		}},
		"its health has the kind of wait, and a change of it only if that lasts": {leaves, []step{
			{at: 0, holders: "pod default/a", health: moves + ": waits for the end of running work"}, {at: 9 * s, health: moves + ": waits for the end of running work"},
			{at: 12 * s, holders: "pod default/b", health: moves + ": waits for the end of running work"}, {at: 20 * s, health: moves + ": waits for the end of running work"},
			{at: 30 * s, health: moves}, {at: 31 * s, unknown: true, health: moves}, {at: 32 * s, health: moves},
			{at: 40 * s, unknown: true, health: moves}, {at: 50 * s, unknown: true, health: moves + ": waits for a record of running work"},
		}},
		"the record is not known": {leaves, []step{
			{at: 0, unknown: true, want: moves, waits: "the record"}, {at: 300 * s, unknown: true, want: moves}, {at: 301 * s, want: moves}, {at: 331 * s, want: "elsewhere: nomad"},
		}},
		"forced, the record is not known": {forced(inventory.DevicePlugin, inventory.Nomad), []step{
			{at: 0, unknown: true, forced: true, want: moves}, {at: 1 * s, unknown: true, forced: true, want: moves},
			{at: 31 * s, unknown: true, forced: true, want: "elsewhere: nomad"},
		}},
		"forced, with a known holder, after which the record is not known": {forced(inventory.DevicePlugin, inventory.Nomad), []step{
			{at: 0, holders: "pod default/a", want: moves}, {at: 600 * s, unknown: true, holders: "pod default/a", want: moves, waits: "pod default/a"},
			{at: 601 * s, unknown: true, want: moves, waits: "pod default/a"}, {at: 900 * s, unknown: true, want: moves, waits: "pod default/a"},
			{at: 901 * s, restart: true, unknown: true, want: moves, waits: "the record"},
		}},
		"forced when a holder that was seen is not known any more": {leaves, []step{
			{at: 0, holders: "pod default/a", want: moves}, {at: 10 * s, unknown: true, want: moves, waits: "the end of pod default/a"},
			{at: 20 * s, force: true, unknown: true, want: moves, waits: "the end of pod default/a"}, {at: 600 * s, unknown: true, want: moves, waits: "the end of pod default/a"},
			{at: 601 * s, age: 602 * s, want: moves, waits: "the end of pod default/a"}, {at: 602 * s, age: 20 * s, want: moves}, {at: 632 * s, want: "elsewhere: nomad"},
		}},
		"forced, of two holders one is not known any more": {leaves, []step{
			{at: 0, holders: "pod default/a, pod default/b", want: moves}, {at: 10 * s, unknown: true, holders: "pod default/b", want: moves, waits: "the end of pod default/a, pod default/b"},
			{at: 20 * s, force: true, unknown: true, want: moves, waits: "the end of pod default/a, pod default/b"}, {at: 30 * s, holders: "pod default/a", want: moves, waits: "the end of pod default/a"},
			{at: 31 * s, want: moves}, {at: 61 * s, want: "elsewhere: nomad"},
		}},
		"what had the GPU before, without a record": {leaves, []step{
			{at: 0, unknown: true, before: "pod default/a", want: moves, waits: "the record"}, {at: 600 * s, unknown: true, before: "pod default/a", want: moves, waits: "the record"},
		}},
		"forced, what had the GPU before, without a record": {forced(inventory.DevicePlugin, inventory.DRA), []step{
			{at: 0, unknown: true, before: "pod default/a", forced: true, want: "device-plugin, moves to dra"}, {at: 1 * s, unknown: true, before: "pod default/a", forced: true, want: "device-plugin, moves to dra"},
			{at: 31 * s, unknown: true, before: "pod default/a", forced: true, want: "dra"}, {at: 32 * s, unknown: true, before: "pod default/a", want: "dra"},
		}},
		"it comes, and the other agent still offers it": {ownership.Entry{Owner: inventory.DRA, Target: inventory.DRA}, []step{
			{at: 0, overlap: &nomad, want: "dra, moves to dra: waits for nomad-gpu", waits: "which offers it, to give it up"}, {at: 1 * s, want: "dra"},
		}},
		"it comes, and an agent that was removed has it in its file": {ownership.Entry{Owner: inventory.DRA, Target: inventory.DRA}, []step{
			{at: 600 * s, overlap: &away, want: "dra, moves to dra: waits for nomad-gpu", waits: "delete its file"},
		}},
		"forced from an agent that does not run": {forced(inventory.Nomad, inventory.DRA), []step{
			{at: 0, overlap: &away, forced: true, want: "elsewhere: nomad", waits: "nomad-gpu, which does not run, to stay away"},
			{at: 29 * s, overlap: &away, forced: true, want: "elsewhere: nomad"}, {at: 30 * s, overlap: &away, forced: true, want: "dra"},
			{at: 31 * s, overlap: &nomad, runs: true, forced: true, want: "dra, moves to dra: waits for nomad-gpu"}, {at: 32 * s, runs: true, want: "dra"},
			{at: 33 * s, overlap: &away, want: "dra, moves to dra: waits for nomad-gpu"},
		}},
		"forced from an agent that was removed, and a restart afterwards": {forced(inventory.Nomad, inventory.DRA), []step{
			{at: 0, overlap: &away, forced: true, want: "elsewhere: nomad"}, {at: 30 * s, overlap: &away, forced: true, want: "dra"},
			{at: 31 * s, restart: true, overlap: &away, forced: true, want: "dra"}, {at: 90 * s, overlap: &away, forced: true, want: "dra"},
			{at: 91 * s, overlap: &nomad, runs: true, forced: true, want: "dra, moves to dra: waits for nomad-gpu"},
			{at: 92 * s, restart: true, overlap: &away, forced: true, want: "dra, moves to dra: waits for nomad-gpu"}, {at: 122 * s, overlap: &away, forced: true, want: "dra"},
		}},
		"forced, while an agent is restarted": {forced(inventory.Nomad, inventory.DRA), []step{
			{at: 0, overlap: &away, forced: true, want: "elsewhere: nomad"}, {at: 20 * s, overlap: &nomad, runs: true, forced: true, want: "elsewhere: nomad"},
			{at: 40 * s, overlap: &away, forced: true, want: "elsewhere: nomad"}, {at: 69 * s, overlap: &away, forced: true, want: "elsewhere: nomad"},
			{at: 70 * s, overlap: &away, forced: true, want: "dra"},
		}},
		"forced from an agent that runs and has no overlap": {forced(inventory.Nomad, inventory.DRA), []step{
			{at: 0, runs: true, forced: true, want: "elsewhere: nomad"}, {at: 600 * s, runs: true, forced: true, want: "elsewhere: nomad", waits: "nomad-gpu to give it up"},
		}},
		"forced, no agent has recorded it, and that which offers it does not run": {forced("", inventory.DRA), []step{
			{at: 0, overlap: &away, forced: true, want: "elsewhere: "}, {at: 30 * s, overlap: &away, forced: true, want: "device-plugin, moves to dra"},
			{at: 60 * s, overlap: &away, forced: true, want: "dra"}, {at: 61 * s, want: "dra"},
		}},
		"forced within the agent": {forced(inventory.DevicePlugin, inventory.DRA), []step{
			{at: 0, unknown: true, forced: true, want: "device-plugin, moves to dra"}, {at: 1 * s, unknown: true, forced: true, want: "device-plugin, moves to dra"},
			{at: 31 * s, unknown: true, forced: true, want: "dra"}, {at: 32 * s, unknown: true, want: "dra"},
		}},
		"another API of the agent has it": {ownership.Entry{Owner: inventory.DevicePlugin, Target: inventory.DRA}, []step{
			{at: 0, want: "device-plugin, moves to dra"}, {at: 1 * s, want: "device-plugin, moves to dra"}, {at: 31 * s, want: "dra"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			file := ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{one: tc.entry}}
			var state ownership.State
			var applied *inventory.GPUOwner
			var reserved *time.Duration
			for _, st := range tc.steps {
				if st.reserved {
					reserved = &st.at
				}
				if st.force {
					e := file.GPUs[one]
					e.Force = true
					file.GPUs[one] = e
				}
				if st.restart {
					state = ownership.State{}
				}
				var all []ownership.Status
				state, file, all = ownership.Next(state, st.input(file, applied, reserved))
				applied = &all[0].GPUOwner
				if got := describe(all[0].GPUOwner); !strings.HasPrefix(got, st.want) || st.want == "dra" && got != "dra" || !strings.Contains(all[0].Waits, st.waits) {
					t.Errorf("%v: %s, waits for %q; want %s, %q", st.at, got, all[0].Waits, st.want, st.waits)
				}
				if got := describe(all[0].GPUOwner); st.health != "" && got != st.health {
					t.Errorf("%v: health %q, want %q", st.at, got, st.health)
				}
				if got := file.GPUs[one].Force; got != st.forced {
					t.Errorf("%v: forced: %v", st.at, got)
				}
			}
		})
	}
}

func forced(owner, target inventory.API) ownership.Entry {
	return ownership.Entry{Owner: owner, Target: target, Force: true}
}

func describe(a inventory.GPUOwner) string {
	switch {
	case !a.Local:
		return "elsewhere: " + string(a.API)
	case a.Pending != "":
		return string(a.API) + ", moves " + a.Pending
	}
	return string(a.API)
}

var began = time.Unix(0, 0)

// input is what the agent of the kubelet, which serves both of its APIs, sees in a step.
func (st step) input(file ownership.File, applied *inventory.GPUOwner, reserved *time.Duration) ownership.Input {
	record := func() holders.Record {
		r := holders.Record{Complete: !st.unknown, Missing: "the record", At: began.Add(st.at - st.age)}
		if st.holders != "" {
			r.Holders = coretest.Held(one, strings.Split(st.holders, ", ")...)
		}
		if st.other != "" {
			r.Holders = append(r.Holders, coretest.Held("GPU-2", st.other)...)
		}
		if st.before != "" {
			r.Holders, r.Never, r.MayHaveEnded = coretest.Held(one, st.before), true, true
		}
		return r
	}
	none := func(gpu.DeviceID) bool { return false }
	return ownership.Input{
		Clock: ownership.Clock{Began: began}, Now: st.at, Agent: ownership.KubernetesAgent, APIs: []inventory.API{inventory.DevicePlugin, inventory.DRA}, Default: inventory.DevicePlugin,
		GPUs: []gpu.DeviceID{one}, File: file, Recorded: none, OfferedBefore: none,
		Running: func(string) bool { return st.runs },
		Records: ownership.Records{inventory.DevicePlugin: record},
		Overlaps: func(gpu.DeviceID) (all []ownership.Overlap) {
			if st.overlap != nil {
				all = append(all, *st.overlap)
			}
			return all
		},
		Applied: func(gpu.DeviceID) (inventory.GPUOwner, bool) {
			if applied == nil {
				return inventory.GPUOwner{}, false
			}
			return *applied, true
		},
		Reserved: func(gpu.DeviceID) (time.Duration, bool) {
			if reserved == nil {
				return 0, false
			}
			return *reserved, true
		},
	}
}
