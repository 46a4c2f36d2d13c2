package ownership

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

func newStore(t *testing.T, folder, agent string, refuse bool) (*store, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	r := &store{
		folder: folder, agent: agent, boot: "b00t", refuse: refuse, started: now,
		log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	t.Cleanup(r.close)
	return r, &log
}

// update updates the files, which must succeed.
func update(t *testing.T, r *store, at ...gpu.Placement) view {
	t.Helper()
	v, err := r.update(t.Context(), want(at...))
	if err != nil {
		t.Fatalf("%s: %v", r.agent, err)
	}
	return v
}

// stopped are the agents that do not run and offer devices of this one.
func (v view) stopped() []otherAgent {
	return slices.DeleteFunc(slices.Clone(v.others), func(o otherAgent) bool { return o.running || o.devices == 0 })
}

// inFile are the placements in the file of an agent.
func inFile(t *testing.T, folder, agent string) []gpu.Placement {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, agent+".json"))
	check.NoError(t, err)
	e, err := decode(text, agent)
	check.NoError(t, err)
	return placements(e.devices)
}

// Devices stay after a restart and a crash, not after a reboot.
func TestFilesOutliveTheAgent(t *testing.T) {
	folder := t.TempDir()
	a, _ := newStore(t, folder, "nomad-gpu", true)
	b, _ := newStore(t, folder, "k8s-gpu", true)
	update(t, a, whole(1))
	if v := update(t, b, whole(1)); len(v.stopped()) != 0 {
		t.Errorf("it is running: %v", v.stopped())
	}
	a.close()
	v := update(t, b, whole(1))
	if len(v.stopped()) != 1 || v.stopped()[0] != (otherAgent{"nomad-gpu", filepath.Join(folder, "nomad-gpu.json"), false, 1}) || len(inFile(t, folder, "k8s-gpu")) != 0 {
		t.Errorf("%v", v)
	}

	again, _ := newStore(t, folder, "nomad-gpu", true)
	unread := localDevices{unsure: func(gpu.Placement) bool { return true }}
	if _, err := again.update(t.Context(), unread); err != nil {
		t.Fatal(err)
	}
	if v := update(t, b, whole(1)); len(v.stopped()) != 0 || len(inFile(t, folder, "nomad-gpu")) != 1 || len(inFile(t, folder, "k8s-gpu")) != 0 {
		t.Errorf("it runs again and has not read the driver yet: %v", v)
	}
	again.close()

	b.boot = "another"
	if v := update(t, b, whole(1)); len(v.overlaps)+len(v.stopped()) != 0 || len(inFile(t, folder, "k8s-gpu")) != 1 {
		t.Errorf("after a reboot: %v", v)
	}
	b.boot = "" // unknown is no sign of a reboot
	if v := update(t, b, whole(1)); len(v.overlaps) != 1 {
		t.Errorf("without a boot id: %v", v)
	}
}

// The file of an agent that was removed takes effect when it is removed. While the agent runs it is written again, and nothing changes hands.
func TestRemovedFiles(t *testing.T) {
	folder := filepath.Join(t.TempDir(), FolderName)
	a, _ := newStore(t, folder, "nomad-gpu", true)
	b, _ := newStore(t, folder, "k8s-gpu", true)
	expect := func(when string, nomad, kube []gpu.Placement) {
		t.Helper()
		if n, k := inFile(t, folder, "nomad-gpu"), inFile(t, folder, "k8s-gpu"); !slices.Equal(n, nomad) || !slices.Equal(k, kube) {
			t.Errorf("%s: %v and %v", when, n, k)
		}
	}
	both := []gpu.Placement{whole(1), whole(2)}
	update(t, a, whole(1))
	update(t, b, both...)
	check.NoError(t, os.Remove(filepath.Join(folder, "nomad-gpu.json")))
	if v := update(t, b, both...); len(v.faults) != 1 || !errors.Is(v.faults[0].err, errUnwritten) || !v.faults[0].remembered {
		t.Errorf("faults: %v", v.faults)
	}
	update(t, a, whole(1))
	expect("removed while it runs", both[:1], both[1:])

	check.NoError(t, os.RemoveAll(folder))
	if v := update(t, b, both...); len(v.stopped()) != 1 {
		t.Errorf("with the folder gone: %v", v)
	}
	update(t, a, both...)
	expect("with the folder gone", both[:1], both[1:])

	a.close()
	check.NoError(t, os.Remove(filepath.Join(folder, "nomad-gpu.json")))
	b.removed = now // long ago
	update(t, b, both...)
	if got := inFile(t, folder, "k8s-gpu"); !slices.Equal(got, both) {
		t.Errorf("removed after its end: %v", got)
	}
}

// The agent does not take back what an operator has removed from its file, or with it, while it runs.
func TestOwnFileRemoved(t *testing.T) {
	folder := t.TempDir()
	a, _ := newStore(t, folder, "nomad-gpu", true)
	update(t, a, whole(1))
	check.NoError(t, os.Remove(filepath.Join(folder, "nomad-gpu.json")))
	if _, err := a.update(t.Context(), localDevices{unsure: func(gpu.Placement) bool { return true }}); err != nil {
		t.Fatal(err)
	}
	if got := inFile(t, folder, "nomad-gpu"); len(got) != 0 {
		t.Errorf("recorded %v", got)
	}
}

// An agent whose own file can't be read writes it again: from what it remembers, or when it has read its GPUs. Until then the file stays as it
// is, so that no other agent finds that it offers nothing.
func TestOwnFileDamaged(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "nomad-gpu.json")
	a, log := newStore(t, folder, "nomad-gpu", true)
	other, _ := newStore(t, folder, "k8s-gpu", true)
	update(t, a, whole(1))
	update(t, other, whole(1), whole(2))
	check.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
	unread := localDevices{unsure: func(gpu.Placement) bool { return true }}
	if _, err := a.update(t.Context(), unread); err != nil || !slices.Equal(inFile(t, folder, "nomad-gpu"), []gpu.Placement{whole(1)}) {
		t.Errorf("it remembers its devices: %v\n%s", err, log)
	}

	a.close()
	check.NoError(t, os.WriteFile(path, []byte("{"), 0o600))
	again, log := newStore(t, folder, "nomad-gpu", true)
	_, err := again.update(t.Context(), unread)
	if _, part := errors.AsType[writeError](err); !part || !strings.Contains(err.Error(), path) {
		t.Errorf("in a new process: %v", err)
	}
	fresh, _ := newStore(t, folder, "third-gpu", true)
	if v := update(t, fresh, whole(1), whole(3)); len(inFile(t, folder, "third-gpu")) != 0 || !strings.Contains(v.own.Reason, "nomad-gpu") {
		t.Errorf("an agent that has read nothing before: %+v", v.own)
	}
	if v := update(t, again, whole(1)); len(v.own.At) != 1 || !slices.Equal(inFile(t, folder, "nomad-gpu"), []gpu.Placement{whole(1)}) {
		t.Errorf("when it has read its GPUs: %+v\n%s", v.own, log)
	}
	update(t, other, whole(1), whole(2))
	if got := inFile(t, folder, "k8s-gpu"); !slices.Equal(got, []gpu.Placement{whole(2)}) {
		t.Errorf("the other agent has %v", got)
	}
}

func TestDuplicateAgent(t *testing.T) {
	folder := t.TempDir()
	first, _ := newStore(t, folder, "nomad-gpu", true)
	second, _ := newStore(t, folder, "nomad-gpu", true)
	other, _ := newStore(t, folder, "k8s-gpu", true)
	update(t, first, whole(1))
	update(t, other, whole(2))
	v, err := second.update(t.Context(), want(whole(1), whole(2)))
	if !errors.Is(err, errDuplicateAgent) || len(v.overlaps) != 1 || !v.overlaps[0].Earlier {
		t.Errorf("%v, %v", v, err)
	}
	if got := inFile(t, folder, "nomad-gpu"); len(got) != 1 {
		t.Errorf("the second one wrote %v", got)
	}
	first.close()
	update(t, second, whole(1), whole(3))
	if got := inFile(t, folder, "nomad-gpu"); len(got) != 2 {
		t.Errorf("it is the only one now: %v", got)
	}
}

func TestFilesThatCannotBeUsed(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"later.json": `{"version": 9, "agent": "later", "devices": "by other rules"}`, "garbage.json": "\x00\xff",
		"empty.json": "", "Bad Name.json": "{}", ".k8s-gpu.json123": "cut sh", "notes.txt": "",
	} {
		check.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
	}
	check.NoError(t, os.Mkdir(filepath.Join(folder, "folder.json"), 0o700))
	check.NoError(t, os.Symlink("/dev/zero", filepath.Join(folder, "link.json")))
	r, _ := newStore(t, folder, "k8s-gpu", true)
	for range 3 {
		if v := update(t, r, whole(0)); len(v.overlaps) != 0 || len(v.faults) != 5 || len(inFile(t, folder, "k8s-gpu")) != 0 {
			t.Errorf("overlaps %v, %d faults, want one for each file that can't be read: %v", v.overlaps, len(v.faults), v.faults)
		}
	}
	if _, err := os.Stat(filepath.Join(folder, ".k8s-gpu.json123")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a temporary file is still there: %v", err)
	}

	folder = t.TempDir()
	other, _ := newStore(t, folder, "nomad-gpu", true)
	update(t, other, whole(1))
	check.NoError(t, os.Mkdir(filepath.Join(folder, "k8s-gpu.json"), 0o700)) // can't be replaced by a file
	r, _ = newStore(t, folder, "k8s-gpu", true)
	v, err := r.update(t.Context(), want(whole(0), whole(1)))
	if _, part := errors.AsType[writeError](err); !part || len(v.overlaps) != 1 || !v.overlaps[0].Earlier {
		t.Errorf("the devices of others: %v, %v", v, err)
	}

	blocked, _ := newStore(t, filepath.Join(folder, "nomad-gpu.json", FolderName), "k8s-gpu", true)
	if _, err := blocked.update(t.Context(), want(whole(0))); err == nil {
		t.Error("a folder that can't be created was created")
	}
}

// One update of the files of two agents, each with 16 GPUs of 7 instances.
func BenchmarkUpdate(b *testing.B) {
	folder := b.TempDir()
	var all []gpu.Placement
	for n := range 16 {
		for gi := range 7 {
			all = append(all, instance(n, uint32(gi)))
		}
	}
	var agents []*store
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		r := &store{folder: folder, agent: agent, boot: "b00t", log: slog.New(slog.DiscardHandler)}
		defer r.close()
		agents = append(agents, r)
		if _, err := r.update(b.Context(), want(all...)); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if _, err := agents[1].update(b.Context(), want(all...)); err != nil {
			b.Fatal(err)
		}
	}
}

// numbered updates the file of an agent that has a number for a GPU.
func numbered(t *testing.T, r *store, id gpu.DeviceID, number int) view {
	t.Helper()
	o := want()
	o.numbering = inventory.NewNumbering(0, []inventory.Number{{ID: id, Index: gpu.DeviceIndex{GPU: number, Instance: -1}}})
	v, err := r.update(t.Context(), o)
	check.NoError(t, err)
	return v
}

func (v view) number(id gpu.DeviceID) int {
	at, ok := v.numbering.Of(id)
	if !ok {
		return -1
	}
	return at.GPU
}

// Both agents have numbered GPUs before they read the other one's file: the first number in a file counts.
func TestFirstWrittenNumberCounts(t *testing.T) {
	for name, tc := range map[string]struct {
		first, second               gpu.DeviceID
		firstNumber, secondNumber   int
		wantInFirst, wantedBySecond int
	}{
		"two numbers for one GPU": {"GPU-a", "GPU-a", 3, 4, 3, 3},
		"one number for two GPUs": {"GPU-b", "GPU-a", 3, 3, 3, -1},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			a, _ := newStore(t, folder, "nomad-gpu", true)
			b, _ := newStore(t, folder, "k8s-gpu", true)
			for range 2 {
				if v := numbered(t, b, tc.first, tc.firstNumber); v.number(tc.first) != tc.wantInFirst {
					t.Errorf("the first agent has %+v", v.numbering)
				}
				if v := numbered(t, a, tc.second, tc.secondNumber); v.number(tc.second) != tc.wantedBySecond || v.number(tc.first) != tc.wantInFirst {
					t.Errorf("the second agent has %+v", v.numbering)
				}
			}
		})
	}
}

// A state that is older than the file proposes other numbers, as another GPU was removed meanwhile:
//
//	monitor  proposes a=6 ........... GPU x is removed: proposes a=5 ... reads a=6
//	store    .............. writes a=6 ................................. does not write a=5
func TestWrittenNumberStays(t *testing.T) {
	a, _ := newStore(t, t.TempDir(), "nomad-gpu", true)
	numbered(t, a, "GPU-a", 6)
	if v := numbered(t, a, "GPU-a", 5); v.number("GPU-a") != 6 {
		t.Errorf("it has %+v", v.numbering)
	}
	if v := numbered(t, a, "GPU-b", 6); v.number("GPU-b") != 6 || v.number("GPU-a") != -1 {
		t.Errorf("GPU a is gone: %+v", v.numbering)
	}
}

// A later process of the agent reads the written numbers: its history may be lost.
func TestNumbersOutliveTheHistory(t *testing.T) {
	folder := t.TempDir()
	a, _ := newStore(t, folder, "nomad-gpu", true)
	numbered(t, a, "GPU-a", 3)
	a.close()
	again, _ := newStore(t, folder, "nomad-gpu", true)
	if v := update(t, again); v.number("GPU-a") != 3 {
		t.Errorf("it has %+v", v.numbering)
	}
}
