package reset

import "slices"

// Pause has the programs that watch GPUs, and the operator's commands that stop them for a reset and start them again.
// The zero value has none.
type Pause struct {
	Programs     []string // names, of which the kernel keeps the first 15 bytes
	Stop, Resume []string // program and arguments, without a shell
}

// maxComm is how much of a name the kernel keeps (TASK_COMM_LEN).
const maxComm = 15

// Has reports whether a process of this name, as the kernel shows it, is stopped for a reset.
func (p Pause) Has(name string) bool {
	isOne := func(program string) bool { return program[:min(len(program), maxComm)] == name }
	return name != "" && slices.ContainsFunc(p.Programs, isOne)
}

// Stopped returns the state in which the programs that watch GPUs are stopped for a reset, or may be.
func (s State) Stopped() State {
	s.Watchers = true
	return s
}

// Resumed returns the state in which they run again.
func (s State) Resumed() State {
	s.Watchers = false
	return s
}
