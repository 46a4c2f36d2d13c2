package agent

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// folder is a history on a disk that may fail.
type folder struct {
	record core.Checkpoint
	err    error // of Save
	aside  []error
}

func (f *folder) Load() (core.Checkpoint, string) { return f.record, "b" }
func (f *folder) Missing() bool                   { return false }
func (f *folder) SetAside(why error)              { f.aside = append(f.aside, why) }
func (f *folder) Save(r core.Checkpoint) error {
	if f.err == nil {
		f.record = r
	}
	return f.err
}

// Save succeeds only if the record is on disk: the next process does not know what this one has in memory.
func TestHandoverReturnsTheDisksError(t *testing.T) {
	full := errors.New("no space left on device")
	disk := &folder{err: full}
	s := (&Handover{}).next(disk, unknownBoot)
	if err := s.Save(core.Checkpoint{Driver: "1"}); !errors.Is(err, full) {
		t.Errorf("saved: %v", err)
	}
	disk.err = nil
	if err := s.Save(core.Checkpoint{Driver: "1"}); err != nil || disk.record.Driver != "1" {
		t.Errorf("not saved: %v, %+v", err, disk.record)
	}
}

// A record on disk from before a process that could never save is not replaced by the next run of that process.
func TestHandoverReplacesNoUnreadRecord(t *testing.T) {
	for name, tc := range map[string]struct {
		err   error
		aside int
	}{
		"nothing was ever saved": {errors.New("input/output error"), 1},
		"it was":                 {nil, 0},
	} {
		p := &Handover{}
		first := p.next(&folder{err: tc.err}, unknownBoot)
		first.Load()
		if err := first.Save(core.Checkpoint{Driver: "1"}); !errors.Is(err, tc.err) {
			t.Error(err)
		}
		disk := &folder{record: core.Checkpoint{Driver: "0"}}
		if r, _ := p.next(disk, unknownBoot).Load(); r.Driver != "1" || len(disk.aside) != tc.aside {
			t.Errorf("%s: the next run has %+v, set aside: %v", name, r, disk.aside)
		}
	}
}

// A store of an earlier run that returns late overwrites nothing.
func TestHandoverIgnoresEarlierRuns(t *testing.T) {
	p := &Handover{}
	first := p.next(nil, unknownBoot)
	if r, boot := first.Load(); boot != "" || r.BootID != "" {
		t.Errorf("the first run has %+v", r)
	}
	if err := first.Save(core.Checkpoint{BootID: "b", Driver: "1"}); !errors.Is(err, monitor.ErrNoStore) {
		t.Errorf("a record that is only in memory is reported as saved: %v", err)
	}
	second := p.next(nil, unknownBoot)
	if err := first.Save(core.Checkpoint{BootID: "b", Driver: "0"}); err == nil {
		t.Error("the store of an earlier run has saved")
	}
	if r, boot := second.Load(); r.Driver != "1" || boot != "b" {
		t.Errorf("the second run has %+v of boot %q", r, boot)
	}
}

func unknownBoot() core.Boot { return core.Boot{} }
