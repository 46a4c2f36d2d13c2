package main

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
)

// folder is a history on a disk that may fail.
type folder struct {
	record core.Checkpoint
	err    error // of Save
	aside  []error
}

func (f *folder) Load() (core.Checkpoint, string) { return f.record, "b" }
func (f *folder) SetAside(why error)              { f.aside = append(f.aside, why) }
func (f *folder) Save(r core.Checkpoint) error {
	if f.err == nil {
		f.record = r
	}
	return f.err
}

// The order that an operator gave is on disk only if the disk has taken it: that the process remembers it is no help to
// the next one.
func TestThePastTellsWhatTheDiskSaid(t *testing.T) {
	full := errors.New("no space left on device")
	disk := &folder{err: full}
	s := (&past{}).on(disk, unknownBoot)
	if err := s.Save(core.Checkpoint{Driver: "1"}); !errors.Is(err, full) {
		t.Errorf("saved: %v", err)
	}
	disk.err = nil
	if err := s.Save(core.Checkpoint{Driver: "1"}); err != nil || disk.record.Driver != "1" {
		t.Errorf("not saved: %v, %+v", err, disk.record)
	}
}

// What is on disk from before a process that could never save anything is not replaced by its next life.
func TestTheNextLifeReplacesNothingThatWasNotRead(t *testing.T) {
	for name, tc := range map[string]struct {
		err   error
		aside int
	}{
		"nothing was ever saved": {errors.New("input/output error"), 1},
		"it was":                 {nil, 0},
	} {
		p := &past{}
		first := p.on(&folder{err: tc.err}, unknownBoot)
		first.Load()
		if err := first.Save(core.Checkpoint{Driver: "1"}); !errors.Is(err, tc.err) {
			t.Error(err)
		}
		disk := &folder{record: core.Checkpoint{Driver: "0"}}
		if r, _ := p.on(disk, unknownBoot).Load(); r.Driver != "1" || len(disk.aside) != tc.aside {
			t.Errorf("%s: the next life knows %+v, set aside: %v", name, r, disk.aside)
		}
	}
}

func unknownBoot() core.Boot { return core.Boot{} }
