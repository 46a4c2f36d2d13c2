package hostwatch

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
)

func newRegister(t *testing.T, folder, agent string, refuse bool) (*register, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	r := &register{
		folder: folder, agent: agent, boot: "b00t", refuse: refuse, started: now,
		log: slog.New(slog.NewTextHandler(&log, nil)), said: map[string]string{},
	}
	t.Cleanup(r.close)
	return r, &log
}

// see is one round that must work.
func see(t *testing.T, r *register, at ...core.Placement) view {
	t.Helper()
	v, err := r.round(t.Context(), want(at...))
	if err != nil {
		t.Fatalf("%s: %v", r.agent, err)
	}
	return v
}

// gone are the agents that do not run and claim what is ours.
func (v view) gone() []other {
	return slices.DeleteFunc(slices.Clone(v.others), func(o other) bool { return o.lives || o.devices == 0 })
}

// inFile are the placements that an agent has written down.
func inFile(t *testing.T, folder, agent string) []core.Placement {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, agent+".json"))
	if err != nil {
		t.Fatal(err)
	}
	e, err := decode(text, agent)
	if err != nil {
		t.Fatal(err)
	}
	return placements(e.claims)
}

func TestDisjointOffersDoNotMeet(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	for range 2 {
		v, w := see(t, a, gpu(0), instance(1, 1)), see(t, b, instance(1, 2), gpu(2))
		if len(v.gone())+len(w.gone()) != 0 {
			t.Errorf("%v, %v", v, w)
		}
	}
	if got := inFile(t, folder, "k8s-gpu"); !slices.Equal(got, []core.Placement{instance(1, 2), gpu(2)}) {
		t.Errorf("%v", got)
	}
}

func TestHandingOver(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	see(t, a, gpu(0), gpu(1))
	v := see(t, b, gpu(1), gpu(2))
	if !slices.Contains(v.claims, core.Claim{Agent: "nomad-gpu", At: gpu(1), Prior: true}) || !slices.Equal(inFile(t, folder, "k8s-gpu"), []core.Placement{gpu(2)}) {
		t.Errorf("%v, %v", v.claims, inFile(t, folder, "k8s-gpu"))
	}
	see(t, a, gpu(0))
	if v := see(t, b, gpu(1), gpu(2)); len(v.claims) != 1 || v.claims[0].At != gpu(0) || len(inFile(t, folder, "k8s-gpu")) != 2 {
		t.Errorf("%v, %v", v.claims, inFile(t, folder, "k8s-gpu"))
	}
	if v := see(t, a, gpu(0), gpu(1)); !slices.Contains(v.claims, core.Claim{Agent: "k8s-gpu", At: gpu(1), Prior: true}) {
		t.Errorf("it is another's now: %v", v.claims)
	}
}

// Claims stand over a restart and a death, not over a reboot.
func TestClaimsOutliveTheAgent(t *testing.T) {
	folder := t.TempDir()
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	see(t, a, gpu(1))
	if v := see(t, b, gpu(1)); len(v.gone()) != 0 {
		t.Errorf("it lives: %v", v.gone())
	}
	a.close()
	v := see(t, b, gpu(1))
	if len(v.gone()) != 1 || v.gone()[0] != (other{"nomad-gpu", filepath.Join(folder, "nomad-gpu.json"), false, 1}) || len(inFile(t, folder, "k8s-gpu")) != 0 {
		t.Errorf("%v", v)
	}

	again, _ := newRegister(t, folder, "nomad-gpu", true)
	unread := offer{unsure: func(core.Placement) bool { return true }}
	if _, err := again.round(t.Context(), unread); err != nil {
		t.Fatal(err)
	}
	if v := see(t, b, gpu(1)); len(v.gone()) != 0 || len(inFile(t, folder, "nomad-gpu")) != 1 || len(inFile(t, folder, "k8s-gpu")) != 0 {
		t.Errorf("it is back and has not read the driver yet: %v", v)
	}
	again.close()

	b.boot = "another"
	if v := see(t, b, gpu(1)); len(v.claims)+len(v.gone()) != 0 || len(inFile(t, folder, "k8s-gpu")) != 1 {
		t.Errorf("after a reboot: %v", v)
	}
	b.boot = "" // not to know is no sign of a reboot
	if v := see(t, b, gpu(1)); len(v.claims) != 1 {
		t.Errorf("without a boot id: %v", v)
	}
}

// What an operator removes is gone: the disk says who claims what, and not somebody's memory.
func TestRemovedFiles(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "claims")
	a, _ := newRegister(t, folder, "nomad-gpu", true)
	b, _ := newRegister(t, folder, "k8s-gpu", true)
	see(t, a, gpu(1))
	if err := os.Remove(filepath.Join(folder, "nomad-gpu.json")); err != nil {
		t.Fatal(err)
	}
	see(t, b, gpu(1))
	if see(t, a, gpu(1)); len(inFile(t, folder, "nomad-gpu")) != 0 || len(inFile(t, folder, "k8s-gpu")) != 1 {
		t.Error("there are two owners, or none")
	}
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	see(t, a, gpu(1))
	if v := see(t, b, gpu(1)); len(v.gone()) != 0 || len(inFile(t, folder, "nomad-gpu")) != 1 || len(inFile(t, folder, "k8s-gpu")) != 0 {
		t.Errorf("with the folder gone: %v", v)
	}
}

func TestTwin(t *testing.T) {
	folder := t.TempDir()
	first, _ := newRegister(t, folder, "nomad-gpu", true)
	second, _ := newRegister(t, folder, "nomad-gpu", true)
	other, _ := newRegister(t, folder, "k8s-gpu", true)
	see(t, first, gpu(1))
	see(t, other, gpu(2))
	v, err := second.round(t.Context(), want(gpu(1), gpu(2)))
	if !errors.Is(err, errTwin) || len(v.claims) != 1 || !v.claims[0].Prior {
		t.Errorf("%v, %v", v, err)
	}
	if got := inFile(t, folder, "nomad-gpu"); len(got) != 1 {
		t.Errorf("it wrote %v", got)
	}
	first.close()
	see(t, second, gpu(1), gpu(3))
	if got := inFile(t, folder, "nomad-gpu"); len(got) != 2 {
		t.Errorf("it is alone now: %v", got)
	}
}

func TestTroubleOnDisk(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"later.json": `{"version": 9, "agent": "later", "claims": "by other rules"}`, "garbage.json": "\x00\xff",
		"empty.json": "", "Bad Name.json": "{}", ".k8s-gpu.json123": "cut sh", "notes.txt": "",
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(folder, "folder.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(folder, "link.json")); err != nil {
		t.Fatal(err)
	}
	r, log := newRegister(t, folder, "k8s-gpu", true)
	for range 3 {
		if v := see(t, r, gpu(0)); len(v.claims) != 0 {
			t.Errorf("%v", v.claims)
		}
	}
	if n := strings.Count(log.String(), "level=WARN"); n != 5 {
		t.Errorf("%d lines, want one for each file that can't be read:\n%s", n, log)
	}
	if _, err := os.Stat(filepath.Join(folder, ".k8s-gpu.json123")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a crash has left is still there: %v", err)
	}

	if err := os.RemoveAll(filepath.Join(folder, "k8s-gpu.json")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(folder, "k8s-gpu.json"), 0o700); err != nil { // can't be replaced by a file
		t.Fatal(err)
	}
	other, _ := newRegister(t, folder, "nomad-gpu", true)
	see(t, other, gpu(1))
	v, err := r.round(t.Context(), want(gpu(0), gpu(1)))
	if _, part := errors.AsType[unwritten](err); !part || len(v.claims) != 1 || !v.claims[0].Prior {
		t.Errorf("what others claim is seen: %v, %v", v, err)
	}

	blocked, _ := newRegister(t, filepath.Join(folder, "notes.txt", "claims"), "k8s-gpu", true)
	if _, err := blocked.round(t.Context(), want(gpu(0))); err == nil {
		t.Error("a folder that can't be made was made")
	}
}

// An agent that is stopped while it decides keeps the others from looking, not from living.
func TestLockedFolder(t *testing.T) {
	folder := t.TempDir()
	unlock, err := lockFolder(t.Context(), folder)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	r, _ := newRegister(t, folder, "k8s-gpu", true)
	if _, err := r.round(ctx, want(gpu(0))); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// A look at the claims of another agent, each with 16 GPUs of 7 instances.
func BenchmarkRound(b *testing.B) {
	folder := b.TempDir()
	var all []core.Placement
	for n := range 16 {
		for gi := range 7 {
			all = append(all, instance(n, uint32(gi)))
		}
	}
	var agents []*register
	for _, agent := range []string{"nomad-gpu", "k8s-gpu"} {
		r := &register{folder: folder, agent: agent, boot: "b00t", log: slog.New(slog.DiscardHandler), said: map[string]string{}}
		defer r.close()
		agents = append(agents, r)
		if _, err := r.round(b.Context(), want(all...)); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		if _, err := agents[1].round(b.Context(), want(all...)); err != nil {
			b.Fatal(err)
		}
	}
}
