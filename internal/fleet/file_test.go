package fleet_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/filelock"
	"github.com/tandem-gpu/tandem/test/check"
)

// A file has the ledger after it was created, once, and each write replaces what was read.
func TestFileStore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "ledger.json")
	s := fleet.NewFileStore(path)
	if _, _, err := s.Read(t.Context()); !errors.Is(err, fleet.ErrNoLedger) {
		t.Errorf("a missing file: %v", err)
	}
	if _, err := s.Write(t.Context(), rescue.NewLedger(), ""); err == nil {
		t.Error("a missing file is written")
	}
	check.NoError(t, s.Create(t.Context()))
	if err := s.Create(t.Context()); !errors.Is(err, fleet.ErrExists) {
		t.Errorf("created again: %v", err)
	}
	l, first, err := s.Read(t.Context())
	check.NoError(t, err, l.Check())
	stopped := rescue.State{Ledger: l}.Lead().Stopped("anna", "a try", time.Now()).Ledger
	second, err := s.Write(t.Context(), stopped, first)
	check.NoError(t, err)
	if _, err := s.Write(t.Context(), l, first); !errors.Is(err, fleet.ErrConflict) {
		t.Errorf("an old version: %v", err)
	}
	if l, v, err := s.Read(t.Context()); err != nil || v != second || l.Term != 1 || l.Stop == nil || l.Stop.By != "anna" {
		t.Errorf("%v, %s, %+v", err, v, l)
	}
	if stat, err := os.Stat(path); err != nil || stat.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", stat, err)
	}
	for _, text := range []string{"", "{", "[]", "{}", `{"version":2}`, string(make([]byte, 65<<10))} {
		check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		_, _, err := s.Read(t.Context())
		if _, ok := errors.AsType[*fleet.DamagedError](err); !ok {
			t.Errorf("%.20q: %v", text, err)
		}
		if _, err := s.Write(t.Context(), l, second); err == nil {
			t.Errorf("%.20q is replaced", text)
		}
	}
}

// A file has the longest ledger, as a Nomad variable does.
func TestFileStoreLong(t *testing.T) {
	s := fleet.NewFileStore(filepath.Join(t.TempDir(), "ledger.json"))
	check.NoError(t, s.Create(t.Context()))
	l, version, err := s.Read(t.Context())
	check.NoError(t, err)
	for n := 0; ; n++ {
		next := l
		next.Rescues = append(slices.Clone(l.Rescues), rescue.Rescue{
			Cluster: "c", Node: fmt.Sprint("n", n), GPU: "g", Hardware: "h", Cause: "XID_95", Began: time.Now().UTC(), Reserved: time.Now().UTC(),
			Moves: []rescue.Move{{Work: []rescue.Target{{ID: fmt.Sprint(n), Namespace: "ns", Name: "n", Needs: []rescue.Need{{Kind: "k", Units: 1}}}}, Tries: 1, Sent: time.Now().UTC(), Answer: strings.Repeat("t", 300)}},
		})
		if text, err := json.Marshal(next); err != nil || len(text) > rescue.LedgerBytes || next.Check() != nil {
			break
		}
		l = next
	}
	_, err = s.Write(t.Context(), l, version)
	check.NoError(t, err)
	if read, _, err := s.Read(t.Context()); err != nil || len(read.Rescues) != len(l.Rescues) {
		t.Errorf("%d of %d rescues, %v", len(read.Rescues), len(l.Rescues), err)
	}
}

// What root writes stays with the owner of the folder: "sudo gpu-fleet stop --ledger" does not take the ledger from the service.
func TestFileStoreOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can write for another user")
	}
	const service = 65532
	path := filepath.Join(t.TempDir(), "ledger.json")
	check.NoError(t, os.Chown(filepath.Dir(path), service, service))
	s := fleet.NewFileStore(path)
	check.NoError(t, s.Create(t.Context()))
	l, version, err := s.Read(t.Context())
	check.NoError(t, err)
	_, err = s.Write(t.Context(), rescue.State{Ledger: l}.Stopped("anna", "a try", time.Now()).Ledger, version)
	check.NoError(t, err)
	for _, one := range []string{path, path + ".lock"} {
		info, err := os.Stat(one)
		check.NoError(t, err)
		if owner, ok := info.Sys().(*syscall.Stat_t); !ok || owner.Uid != service || owner.Gid != service {
			t.Errorf("%s: %+v", one, info.Sys())
		}
	}
}

// Of several processes that change a file at once, each change is kept.
func TestFileStoreConcurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.json")
	check.NoError(t, fleet.NewFileStore(path).Create(t.Context()))
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			s := fleet.NewFileStore(path)
			for done := 0; done < 10; {
				l, v, err := s.Read(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				switch _, err = s.Write(t.Context(), rescue.State{Ledger: l}.Lead().Ledger, v); {
				case err == nil:
					done++
				case !errors.Is(err, fleet.ErrConflict):
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if l, _, err := fleet.NewFileStore(path).Read(t.Context()); err != nil || l.Term != 40 {
		t.Errorf("%v, term %d", err, l.Term)
	}
}

// One process leads with a file. A second one is refused, until the first has ended.
func TestSingleLeader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "ledger.json")
	one, err := fleet.NewSingleLeader(path, "a")
	check.NoError(t, err)
	if _, err := fleet.NewSingleLeader(path, "b"); !errors.Is(err, filelock.ErrHeld) {
		t.Errorf("a second one: %v", err)
	}
	led := false
	check.NoError(t, one.Lead(t.Context(), func(ctx context.Context) { led = ctx.Err() == nil }))
	if !led || one.Holder() != "a" {
		t.Errorf("led: %t, holder %s", led, one.Holder())
	}
	check.NoError(t, one.Close())
	two, err := fleet.NewSingleLeader(path, "b")
	check.NoError(t, err)
	check.NoError(t, two.Close())
}
