// Package proof decides when a GPU is proved by the operator's command, and what a result means. It is pure: values in, values out; it has no I/O,
// clock, log or goroutine.
//
//	Node    what the agent sees of its node now                       made by the caller
//	State   what is remembered of each GPU, by UUID (on disk, Encode), and what was seen     made by Next
//	Policy  when a GPU is proved, for how long, how many at a time    made from the configuration
//
//	Policy.Next(State, Node, now) -> Result   the state that follows, the proofs to begin and to end, what waits and until when
//
// The caller writes the state of the result to disk before it begins a proof. Then it writes the owner of the GPU, reads holders and processes again,
// asks Policy.Still, and runs the command. State.Ended has the result. A proof that is in the state of a process that was started again was interrupted.
//
// A proof begins only if all of this holds:
//
//   - the GPU takes work by its health, and no work holds it or an instance of it, by a complete record, for SettleTime; it has no process (the
//     caller, which takes it, waits until that is so for 30 s);
//   - for the reason idle: it has been free for Policy.IdleFor, a window is open, and every pool of it has another free GPU;
//   - fewer than Policy.MaxPerNode proofs run on the node.
//
// A GPU that was proved twice within a day after a reset or a fault, and has failed again each time, is a person's: it
// is proved again after a reset or a boot, or when that is a day ago.
//
// Only the verdicts passed and failed mean something. A check that could not run is counted, and tried again after an hour, six hours, and then each
// day; the GPU takes work meanwhile, also one that would wait for its proof.
package proof
