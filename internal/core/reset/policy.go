package reset

// Mode is what an agent does about GPUs that a reset can repair.
type Mode uint8

// The modes.
const (
	Off    Mode = iota // nothing
	Report             // it shows what it would do
	Act
)

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
