// Package ownership decides through which API each GPU of a node is offered, and moves GPUs between the kubelet's device plugins,
// Dynamic Resource Allocation and Nomad so that none of them gives a GPU out while another one's work has it. The agents of a node record
// what each offers, and find overlaps, in the same folder and under the same lock. An agent works without any of it, and warns about what it
// can't read.
//
// A GPU has one owner at a time: the API that has it. Only the agent of that API changes the owner, and only it may offer the GPU. The owner
// is on disk (File), in a directory that the agents of a node share, so a restart or a reboot does not lose it.
//
//	target: dra   device-plugin offers . cordoned: no new work, running work goes on . . . . . . |
//	              pod . . . . . . . . . . . . . . . . . . . . . ends                             |
//	              kubelet's record                                  no holder . . . settle time  | owner: dra
//	              dra                                                                            | offers
//
// An agent may take a GPU that it has for itself, for a proof: then no API gives it out for a while (Watcher.Take).
//
// An owner that can't be read, or whose record of holders can't, has the GPU until that is known.
//
// The decision is pure (Next, and what it calls). A Watcher reads and writes the files, and follows them.
package ownership
