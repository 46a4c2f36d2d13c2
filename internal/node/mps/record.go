package mps

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// RecordFolder is the folder in the state directory with a record of each daemon that the command mps-daemon has
// started.
const RecordFolder = "mps-daemons"

// RecordSuffix is the end of the name of a record, after its pool.
const RecordSuffix = ".json"

// RecordLimit is the size of a record at most.
const RecordLimit = 64 << 10

// RecordPath is the record of the daemon of a pool.
func RecordPath(stateDir, pool string) string {
	return filepath.Join(stateDir, RecordFolder, pool+RecordSuffix)
}

// State is how far the command mps-daemon is with a daemon.
type State string

// States of a daemon.
const (
	Starting State = "starting" // it may not have its limits
	Ready    State = "ready"    // it has them, and takes clients
	Ending   State = "ending"   // it is to end, and takes no more clients
)

// Record is what a record has for the agents.
type Record struct {
	State   State   `json:"state"`
	Control Control `json:"control"` // its control file; zero = it is not known yet
}

var (
	errStarting = errors.New("it has not got its limits yet")
	errEnding   = errors.New("it ends when its clients have ended: its pool has other GPUs or limits, " +
		"or one of its GPUs is proved or reset")
	errReplaced = errors.New("another process has taken the place of its control socket")
)

// checkRecord reports why a daemon that serves a control file takes no clients; nil for a daemon without a record:
// another program has started it.
func (d Daemons) checkRecord(pool string, control Control) error {
	r, err := d.record(pool)
	if err != nil {
		return nil //nolint:nilerr // the daemon is another program's
	}
	switch {
	case r.Control != (Control{}) && r.Control != control:
		return errReplaced
	case r.State == Starting:
		return errStarting
	case r.State == Ending:
		return errEnding
	}
	return nil
}

// Recorded reports whether mps-daemon runs the daemon of a pool, or has not set back the compute mode of its GPUs. A
// record that can't be read counts.
func (d Daemons) Recorded(pool string) bool {
	_, err := d.record(pool)
	return !errors.Is(err, fs.ErrNotExist)
}

func (d Daemons) record(pool string) (r Record, err error) {
	if d.stateDir == "" {
		return r, fs.ErrNotExist
	}
	text, err := statefile.Read(RecordPath(d.stateDir, pool), RecordLimit, statefile.SharedDir)
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	return r, err
}
