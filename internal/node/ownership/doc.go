// Package ownership decides through which API each GPU of a host is offered, and moves GPUs between the kubelet's device plugins,
// Dynamic Resource Allocation and Nomad so that none of them gives a GPU out while another one's work has it. It is pure: next.go and what that calls.
//
// A GPU is on one side at a time: that of the API that has it. Only the agent of that side changes the side, and only it may offer the
// GPU. The side is on disk (File), in a directory that the agents of a host share, so a restart or a reboot does not lose it.
//
//	target: dra   device-plugin offers . withheld: no new work, running work goes on . . . . . . |
//	              pod . . . . . . . . . . . . . . . . . . . . . ends                             |
//	              kubelet's record                                  no holder . . . settle time  | side: dra
//	              dra                                                                            | offers
//
// A side that can't be read, or whose record of holders can't, has the GPU until that is known.
package ownership
