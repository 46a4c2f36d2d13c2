package ownership_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/test/check"
)

// A file is read as it was written, with fields of later versions ignored; what is not one is an error and never half of one.
func TestFile(t *testing.T) {
	dir := t.TempDir()
	if f, err := ownership.Read(dir); err != nil || !f.Empty() {
		t.Errorf("without a file: %+v, %v", f, err)
	}
	f := ownership.File{
		GPUs:      map[gpu.DeviceID]ownership.Entry{one: {Target: inventory.DRA, Owner: inventory.Nomad, Epoch: 3, TargetRevision: 4, Settle: 3 * time.Second, Force: true, AgentGone: "nomad-gpu"}},
		LocalAPIs: map[string]map[gpu.DeviceID]inventory.API{"k8s-gpu": {"GPU-2": inventory.DRA}},
		Previous:  map[gpu.DeviceID]inventory.API{one: inventory.Nomad},
	}
	check.NoError(t, ownership.Write(dir, f))
	if got, err := ownership.Read(dir); err != nil || !got.Equal(f) {
		t.Errorf("%+v, %v, want %+v", got, err, f)
	}
	for text, valid := range map[string]bool{
		`{"version": 2, "gpus": {}, "later": 1}`:                                          true,
		`{"version": 3, "gpus": {}}`:                                                      false,
		`{"version": 2, "gpus": {"GPU-1": {"target": "drra"}}}`:                           false,
		`{"version": 2, "gpus": {"GPU-1": {"target": "dra", "owner": "x"}}}`:              false,
		`{"version": 2, "gpus": {"../x": {"target": "dra"}}}`:                             false,
		`{"version": 2, "gpus": {"GPU-1": {"target": "dra", "settle": "soon"}}}`:          false,
		`{"version": 2, "gpus": {}, "localAPIs": {"k8s-gpu": {"GPU-1": ""}}}`:             false,
		`{"version": 2, "gpus": {"GPU-1": {"target": "dra", "epoch": 9999999999999999}}}`: false,
		`{"version": 2, "gpus": {"GPU-1": {"target": "dra", "agentGone": "another"}}}`:    false,
		`{`: false,
	} {
		check.NoError(t, os.WriteFile(filepath.Join(dir, ownership.FileName), []byte(text), 0o600))
		_, err := ownership.Read(dir)
		if (err == nil) != valid || err != nil && !errors.Is(err, ownership.ErrFormat) {
			t.Errorf("%s: %v", text, err)
		}
		if ownership.Needs(dir, inventory.DRA) == valid {
			t.Errorf("%s: needs dra: %v", text, !valid)
		}
	}
}

// Force that has ended does not come back with an older file, and force of a new target does not end by what an agent remembers.
func TestForceAfterRestore(t *testing.T) {
	entry := func(change uint64, force bool) ownership.File {
		return ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{one: {Target: inventory.DRA, Owner: inventory.DRA, Epoch: 2, TargetRevision: change, Force: force}}}
	}
	for name, tc := range map[string]struct {
		onDisk, remembered ownership.File
		want               bool
	}{
		"the file is older, from before the end": {entry(4, true), entry(4, false), false},
		"the other agent has ended it":           {entry(4, false), entry(4, true), false},
		"it goes on":                             {entry(4, true), entry(4, true), true},
		"a new target":                           {entry(5, true), entry(4, false), true},
		"a new target, which the file lacks":     {entry(4, false), entry(5, true), true},
	} {
		if got := tc.onDisk.Restore(ownership.KubernetesAgent, tc.remembered).GPUs[one].Force; got != tc.want {
			t.Errorf("%s: force %v, want %v", name, got, tc.want)
		}
	}
}

// That force does without an agent counts only as long as all that remember the entry agree: the agent may have run in between.
func TestAbsenceAfterRestore(t *testing.T) {
	entry := func(without string) ownership.File {
		e := ownership.Entry{Target: inventory.DRA, Owner: inventory.DRA, Epoch: 2, TargetRevision: 4, Force: true, AgentGone: without}
		return ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{one: e}}
	}
	for name, tc := range map[string]struct{ onDisk, remembered, want string }{
		"the file is older, from before the end": {"nomad-gpu", "", ""},
		"the other agent has ended it":           {"", "nomad-gpu", ""},
		"it goes on":                             {"nomad-gpu", "nomad-gpu", "nomad-gpu"},
	} {
		if got := entry(tc.onDisk).Restore(ownership.KubernetesAgent, entry(tc.remembered)).GPUs[one].AgentGone; got != tc.want {
			t.Errorf("%s: without %q, want %q", name, got, tc.want)
		}
	}
}

// What an agent has taken is in the file until it is removed there: an agent that remembers a mark does not bring it back.
func TestMarksInTheFile(t *testing.T) {
	marked := ownership.File{Taken: map[gpu.DeviceID]ownership.Mark{one: {Agent: "nomad-gpu", Purpose: inventory.Reset, DriverReleased: true}}}
	text, err := marked.Encode()
	check.NoError(t, err)
	read, err := ownership.Decode(text)
	if err != nil || !read.Equal(marked) || read.Empty() {
		t.Errorf("%s: %+v, %v", text, read, err)
	}
	if got := (ownership.File{}).Restore("nomad-gpu", marked); len(got.Taken) > 0 {
		t.Errorf("%+v", got)
	}
	for _, mark := range []string{`{"agent": "other", "for": "proof"}`, `{"agent": "k8s-gpu", "for": "a\nb"}`, `{"agent": "k8s-gpu"}`} {
		if _, err := ownership.Decode([]byte(`{"version": 2, "gpus": {}, "taken": {"GPU-1": ` + mark + `}}`)); !errors.Is(err, ownership.ErrFormat) {
			t.Errorf("%s: %v", mark, err)
		}
	}
}

// The target that was set last counts, also if the file was lost in between, if two are set in one millisecond, and after a step back of
// the clock.
func TestLastTargetCounts(t *testing.T) {
	now := time.UnixMilli(1_800_000_000_123)
	set := func(f ownership.File, to inventory.API, at time.Time) ownership.File {
		return f.WithTargets([]ownership.TargetChange{{GPU: one, Target: to, From: inventory.Nomad, Settle: time.Second}}, at)
	}
	was := ownership.File{GPUs: map[gpu.DeviceID]ownership.Entry{one: {Target: inventory.Nomad, Owner: inventory.Nomad, Epoch: 7, TargetRevision: 4}}}
	first := set(was, inventory.DRA, now)
	for name, tc := range map[string]struct{ onDisk, remembered ownership.File }{
		"the file was lost":               {set(ownership.File{}, inventory.DevicePlugin, now.Add(time.Millisecond)), first},
		"the file is older":               {set(was, inventory.DevicePlugin, now.Add(time.Millisecond)), first},
		"another one in this millisecond": {set(first, inventory.DevicePlugin, now), first},
		"the clock went back":             {set(first, inventory.DevicePlugin, now.Add(-time.Hour)), first},
		"a clock before 1970":             {set(first, inventory.DevicePlugin, time.Unix(-1, 0)), first},
		"the greatest number":             {set(first, inventory.DevicePlugin, time.UnixMilli(1<<60)), first},
	} {
		text, err := tc.onDisk.Encode()
		check.NoError(t, err)
		read, err := ownership.Decode(text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		got := read.Restore(ownership.KubernetesAgent, tc.remembered)
		if e := got.GPUs[one]; e.Target != inventory.DevicePlugin || e.Settle != time.Second || e.Owner != inventory.Nomad || e.Epoch != 7 {
			t.Errorf("%s: %+v", name, e)
		}
		if again := read.Restore(ownership.NomadAgent, got); !again.Equal(got) {
			t.Errorf("%s: restored by one agent %+v, by the other %+v", name, got, again)
		}
	}
}
