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

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// A disk that hangs during the load delays the first fingerprint for at most firstFingerprintTimeout. No devices are sent
// until the names are loaded, which would get other names; reservations work.
func TestHangingLoad(t *testing.T) {
	dir := t.TempDir()
	checkProcess(t, dir, twoPairs, inIslands(0, 0, 2, 2))
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
		checkContains(t, s.Log.String(), "check whether the disk hangs")
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
			t.Errorf("sent before the names are loaded: %+v", r)
		case <-time.After(time.Minute):
		}
		close(disk)
		checkEqual(t, "groups", inIslands(0, 0, 2, 2), groupByDevice(t, (<-ch).Devices))
		cancel()
		s.stopAndFlush()
	})
}

// A disk that hangs during a save delays each fingerprint with new names for at most maxSaveWait.
func TestHangingSave(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		disk := make(chan struct{})
		var reads atomic.Int64
		s.readFile = func(path string) ([]byte, error) {
			if reads.Add(1) > 1 { // a save reads first
				<-disk
			}
			return readGroupFile(path)
		}
		s.Source.Set(nodeInventory(onlyGPUs(twoPairs, 0, 1)))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		for i, inv := range []*inventory.Allocatable{nil, nodeInventory(onlyGPUs(twoPairs, 0, 1), lost(0)), nodeInventory(twoPairs)} {
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
		checkContains(t, groupFileContent(t, dir), islandName(2))
	})
}

// A failed save is logged once, and repeated.
func TestSaveRetry(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	write(t, dir, "a file")
	synctest.Test(t, func(t *testing.T) {
		s := newSavingFixture(t, dir)
		s.Source.Set(nodeInventory(twoPairs))
		ctx, cancel := context.WithCancel(t.Context())
		ch := fingerprints(ctx, t, s)
		checkEqual(t, "groups", inIslands(0, 0, 2, 2), groupByDevice(t, (<-ch).Devices))
		time.Sleep(3 * saveRetry)
		if n := strings.Count(s.Log.String(), "group names not saved,"); n != 1 {
			t.Errorf("logged %d times:\n%s", n, s.Log.String())
		}
		check.NoError(t, os.Remove(dir))
		time.Sleep(2 * saveRetry)
		checkContains(t, groupFileContent(t, dir), islandName(2))
		checkContains(t, s.Log.String(), "group names saved again")
		cancel()
		s.stopAndFlush()
	})
}
