// Package rescue decides when work leaves a faulty GPU. It is pure: values in, values out; it has no I/O, clock, log or goroutine, and imports
// no orchestrator.
//
//	Fleet   what the clusters of the team show now                     made by the caller, from the orchestrators' APIs
//	State   the ledger (what was reserved, on disk) and what was seen  made by Next
//	Policy  which faults count, the budgets, quorum and attempts       made from the configuration
//
//	Policy.Next(State, Fleet, now) -> Result   the state that follows, the acts that are due, what waits and until when, what is refused and why
//
// The caller writes the ledger of the result before it makes the call of an act, checks the act against the objects as they are then (Policy.Still),
// and gives the answer to State.Answered. A ledger that could not be written makes no act: so an act that was sent is always in a ledger, and a
// process that ends between the two repeats exactly that act.
//
// Work is moved only if all of this holds:
//
//   - its orchestrator's own record gives it hardware that a fault covers which counts, and shows that hardware as unhealthy;
//   - it is replaced elsewhere by its controller, and there is a free healthy place, also if the replacements of all other acts under way take the places
//     that are worst for it;
//   - the budgets have a slot, and neither quorum nor a person has stopped acts.
package rescue
