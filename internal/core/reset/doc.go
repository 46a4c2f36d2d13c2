// Package reset decides when an agent resets a faulty GPU, and when it leaves that to a person or to another system. It is pure: values in, values out;
// it has no I/O, clock, log or goroutine.
//
//	Node    what the agent sees of its node now                        made by the caller
//	State   what is remembered of each GPU, by UUID (on disk, Encode)  made by Next
//	Policy  whether GPUs are reset, and how often                      made from the configuration
//
//	Policy.Next(State, Node, now) -> Result   the state that follows, the reset to begin, what waits and until when
//
// The caller writes the state of the result to disk before it begins a reset. Then it takes the GPU, and its P2P group if Begin.With has one, from every
// API; looks for processes that have it open; asks Policy.Still; has the driver closed; and calls nvidia-smi. State.Ended has the result. A reset that is
// in the state of a process that was started again was interrupted, and counts as an attempt if nvidia-smi may have been called.
//
// A reset begins only if all of this holds:
//
//   - the driver's recovery action is GPU_RESET, or DRAIN_AND_RESET, or it is none and the GPU failed its proof;
//   - no work holds it by a complete record, and no process uses it; for DRAIN_AND_RESET, the same of its P2P group;
//   - it has no MIG instances, or Policy.LoseMIG;
//   - fewer than Policy.Attempts were made for this fault, and the latest of them was not refused for good;
//   - fewer than two were made within a day, for any fault: a GPU that fails again and again is a person's, who goes on with Policy.ByPerson;
//   - nothing pauses resets on the node (Node.Paused), and no other one runs.
//
// A GPU that a process had open is tried again after a minute, 5 minutes, half an hour, and then each two hours; that is no attempt. One that was reset
// because it failed its proof is proved next. A person's reset (Policy.ByPerson) needs no fault, and counts as an attempt.
package reset
