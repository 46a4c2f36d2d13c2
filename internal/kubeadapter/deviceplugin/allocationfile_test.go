package deviceplugin

import (
	"bytes"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

func openAllocationFile(t *testing.T, dir string) (*allocationFile, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	return OpenAllocations(dir, "k8s-gpu", slog.New(slog.NewTextHandler(&log, nil))).(*allocationFile), &log
}

// Load returns what Save stored. Only the owner can read the file, and no other file remains in the directory.
func TestAllocationsOnDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	f, log := openAllocationFile(t, dir)
	if got := f.Load(); got != nil {
		t.Errorf("without a file: %v", got)
	}
	want := []StoredAllocation{
		{Resource: "nvidia.com/gpu", ID: "GPU-1", NUMANode: 1, AllocatedAt: time.Date(2026, 11, 20, 9, 0, 0, 0, time.UTC), WithdrawnAt: time.Date(2026, 11, 20, 10, 31, 0, 0, time.UTC)},
		{Resource: "nvidia.com/gpu.shared", ID: "GPU-2::3", NUMANode: -1},
	}
	for range 2 {
		f.Save(want)
	}
	if err := os.WriteFile(filepath.Join(dir, ".k8s-gpu.allocated.json123"), nil, 0o600); err != nil { // a crash left it
		t.Fatal(err)
	}
	again, _ := openAllocationFile(t, dir)
	if diff := cmp.Diff(want, again.Load()); diff != "" {
		t.Error(diff)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "k8s-gpu.allocated.json" {
		t.Fatalf("%v %v", entries, err)
	}
	if info, err := entries[0].Info(); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	if log.Len() > 0 {
		t.Error(log)
	}
}

// A file that can't be read is logged and ignored.
func TestUnreadableAllocationFiles(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "cut short": `{"version": 2, "allocated": [{"resource": "nvid`, "another version": `{"version": 3}`,
		"another kind": `[]`, "too large": strings.Repeat(" ", allocationFileMaxSize+1),
		"damaged": `{"version": 2, "allocated": [{"resource": "nvidia.com/gpu", "id": "GPU-1"}], "checksum": "crc32c:00000000"}`,
	} {
		t.Run(name, func(t *testing.T) {
			f, log := openAllocationFile(t, t.TempDir())
			check.NoError(t, os.WriteFile(f.path, []byte(text), 0o600))
			if got := f.Load(); got != nil || !strings.Contains(log.String(), f.path) {
				t.Errorf("%v, log %q", got, log)
			}
		})
	}
}

// A failure to write is logged once, and so is the recovery.
func TestFailedSaveOfAllocations(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(dir, nil, 0o600); err != nil { // a file in place of the directory
		t.Fatal(err)
	}
	f, log := openAllocationFile(t, dir)
	f.Save(nil)
	f.Save(nil)
	if n := strings.Count(log.String(), "not saved"); n != 1 {
		t.Errorf("logged %d times: %s", n, log)
	}
	check.NoError(t, os.Remove(dir))
	f.Save(nil)
	if !strings.Contains(log.String(), "saved again") {
		t.Error(log)
	}
}

// A file that someone has removed, with its folder, is written again although no allocation is new.
func TestRemovedAllocationsAreWrittenAgain(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	f, _ := openAllocationFile(t, dir)
	f.Load()
	if f.Missing() {
		t.Error("a file that was never there is missing")
	}
	f.Save([]StoredAllocation{{Resource: "nvidia.com/gpu", ID: "GPU-1", NUMANode: -1}})
	again, _ := openAllocationFile(t, dir)
	again.Load()
	for _, one := range []*allocationFile{f, again} {
		if one.Missing() {
			t.Error("a file that is there is missing")
		}
	}
	check.NoError(t, os.RemoveAll(dir))
	for _, one := range []*allocationFile{f, again} {
		if !one.Missing() {
			t.Error("a removed file is not missing")
		}
	}
	f.Save(nil)
	synctest.Test(t, func(t *testing.T) {
		o := Options{Log: slog.New(slog.DiscardHandler), Handover: new(Handover), AllocationStore: f}
		tr := newTracker(coretest.NewSource(), o, podresources.New(podresources.Options{}))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); tr.persist(ctx) }()
		<-tr.loaded
		check.NoError(t, os.RemoveAll(dir))
		time.Sleep(statefile.LookEvery + time.Second)
		synctest.Wait()
		if _, err := os.Stat(filepath.Join(dir, "k8s-gpu.allocated.json")); err != nil {
			t.Errorf("the file is not written again: %v", err)
		}
		cancel()
		<-ended
	})
}
