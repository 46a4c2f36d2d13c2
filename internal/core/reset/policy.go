package reset

import (
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// Mode is what an agent does about GPUs that a reset can repair.
type Mode uint8

// The modes.
const (
	Off    Mode = iota // nothing
	Report             // it shows what it would do
	Act
)

var modeNames = [...]string{"off", "report", "act"}

// String returns the name of the mode.
func (m Mode) String() string { return modeNames[m] }

// MarshalText returns the name of the mode.
func (m Mode) MarshalText() ([]byte, error) { return gpu.MarshalName(m, modeNames[:], "mode") }

// UnmarshalText parses the output of MarshalText.
func (m *Mode) UnmarshalText(text []byte) error {
	return gpu.UnmarshalName(m, modeNames[:], string(text), "mode")
}

// Policy is whether GPUs are reset. The zero value is off.
type Policy struct {
	Mode     Mode
	Attempts int  // for one fault: 1 or 2
	LoseMIG  bool // GPUs with MIG instances, which a reset removes: another program makes the layout again
}

// Default is the policy of an operator who has set only the mode.
func Default() Policy { return Policy{Attempts: 2} }

// On reports whether it is decided about resets at all.
func (p Policy) On() bool { return p.Mode != Off }

// Times that are no settings.
const (
	afterAttempt = time.Minute // so that the driver has reported its recovery action again
	afterCancel  = 10 * time.Second

	alertAfter = 3 // refusals because of a process

	day       = 24 * time.Hour
	mostInDay = 2 // attempts of one GPU, whatever its faults: from the next one on a person decides
)

// afterInUse is the time after which a GPU that a process had open is tried again: the first time, the second, and so on.
var afterInUse = [...]time.Duration{time.Minute, 5 * time.Minute, 30 * time.Minute, longestRetry}

const longestRetry = 2 * time.Hour

// attempts is how often a GPU is reset for one fault. Whether one GPU of an NVSwitch system can be reset depends on its generation: one try shows it.
func (p Policy) attempts(g *GPU) int {
	if g.NVSwitch {
		return 1
	}
	return max(p.Attempts, 1)
}
