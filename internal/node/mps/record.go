package mps

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// RecordName is the file in the folder of a pool with what the command mps-daemon has started its daemon with.
const RecordName = "tandem.json"

// RecordLimit is the size of a record at most.
const RecordLimit = 64 << 10

// State is how far the command mps-daemon is with a daemon.
type State string

// States of a daemon.
const (
	Starting State = "starting" // it may not have its limits
	Ready    State = "ready"    // it has them, and takes clients
	Ending   State = "ending"   // it ends when it has no client left: its pool is gone, or has other GPUs or limits
)

// Record is what a record has for the agents.
type Record struct {
	PID   string `json:"pid"` // of the daemon, as PID returns it; "" = it is not known yet
	State State  `json:"state"`
}

// PID is the process of the daemon with a pipe directory, as it has recorded it; "" = unknown. It tells one daemon from the next.
func PID(pipe string) string {
	text, _ := os.ReadFile(filepath.Join(pipe, "nvidia-cuda-mps-control.pid")) // drivers before 525 write none
	return strings.TrimSpace(string(text))
}

var (
	errStarting = errors.New("it has not got its limits yet")
	errEnding   = errors.New("it ends when its clients have ended: its pool has other GPUs or limits")
)

// checkRecord reports why a daemon that answers takes no clients so far; nil for one of which there is no record, as another program has started it.
func (d Daemons) checkRecord(pool string) error {
	var r Record
	text, err := statefile.Read(filepath.Join(d.root, domain, pool, RecordName), RecordLimit, statefile.SharedDir)
	other := err != nil || json.Unmarshal(text, &r) != nil || r.PID != "" && r.PID != PID(d.Folder(pool))
	switch {
	case other:
	case r.State == Starting:
		return errStarting
	case r.State == Ending:
		return errEnding
	}
	return nil
}
