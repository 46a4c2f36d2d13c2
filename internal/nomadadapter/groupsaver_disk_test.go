package nomadadapter

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
)

// A disk that hangs while the names are read delays the first fingerprint by no more than a driver does. Nothing is
// offered until the names are known, so that nothing is offered under another one; reservations go on.
func TestDiskThatHangsWhileNamesAreRead(t *testing.T) {
	dir := t.TempDir()
	firstFingerprint(t, newSavingFixture(t, dir), nodeInventory(twoPairs))
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		disk := make(chan struct{})
		s.readFile = func(path string) ([]byte, error) {
			<-disk
			return readGroupFile(path)
		}
		s.Source.Set(nodeInventory(onePair))
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		if r := <-ch; len(r.Devices) != 0 || r.Error != nil || time.Since(began) > firstFingerprintTimeout {
			t.Errorf("first after %v: %+v", time.Since(began), r)
		}
		if all := s.Log.String(); !strings.Contains(all, "check whether the disk hangs") {
			t.Errorf("logged:\n%s", all)
		}
		stats := openStats(ctx, t, s, time.Second)
		if r := <-stats; len(r.Groups) != 0 {
			t.Errorf("statistics: %+v", r.Groups)
		}
		if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
			t.Error(err)
		}
		s.Source.Set(nodeInventory(onePair, lost(0)))
		select {
		case r := <-ch:
			t.Errorf("offered before the names are known: %+v", r)
		case <-time.After(time.Minute):
		}
		close(disk)
		if diff := cmp.Diff(inIslands(0, 0, 2, 2), groupByDevice(t, (<-ch).Devices)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		cancel()
		s.stopAndFlush()
	})
}

// A disk that hangs or is full while names are written delays a fingerprint by a moment, once.
func TestDiskThatHangsWhileNamesAreWritten(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		disk := make(chan struct{})
		var readings atomic.Int64
		s.readFile = func(path string) ([]byte, error) {
			if readings.Add(1) > 1 { // as a writing begins with one
				<-disk
			}
			return readGroupFile(path)
		}
		s.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		for i, inv := range []*core.Inventory{nil, nodeInventory(onlyGPUs(twoPairs, 0, 1), lost(0)), nodeInventory(twoPairs)} {
			began := time.Now()
			if inv != nil {
				s.Source.Set(inv)
			}
			if r := <-ch; len(r.Devices) == 0 || time.Since(began) > fingerprintInterval+maxSaveWait {
				t.Errorf("fingerprint %d after %v: %+v", i, time.Since(began), r)
			}
		}
		close(disk)
		synctest.Wait()
		cancel()
		s.stopAndFlush()
		if text := groupFileContent(t, dir); !strings.Contains(text, islandName(2)) {
			t.Errorf("not written when the disk was back:\n%s", text)
		}
	})
}

// A state directory that can't be written is said once, and tried again.
func TestNamesThatCannotBeKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	write(t, dir, "a file")
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		s.Source.Set(nodeInventory(twoPairs))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		if diff := cmp.Diff(inIslands(0, 0, 2, 2), groupByDevice(t, (<-ch).Devices)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
		time.Sleep(3 * saveRetry)
		if n := strings.Count(s.Log.String(), "group names not saved,"); n != 1 {
			t.Errorf("said %d times:\n%s", n, s.Log.String())
		}
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * saveRetry)
		if text := groupFileContent(t, dir); !strings.Contains(text, islandName(2)) {
			t.Errorf("not written later:\n%s", text)
		}
		if all := s.Log.String(); !strings.Contains(all, "group names saved again") {
			t.Errorf("logged:\n%s", all)
		}
		cancel()
		s.stopAndFlush()
	})
}
