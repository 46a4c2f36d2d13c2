// Package limitserver sets limits of device memory for the agents of a node that have no rights for it, as on Kubernetes. It is a component as package component
// describes them.
//
//	agent                                          component, root on the node
//	Client --- POST, JSON --- <state dir>/limits.sock --- Server --- Driver: open, set, close
//
// The server sets limits for the groups of pods and of their containers only, and for no group that has taken the place of another one. Whether a GPU takes limits
// at all it tries on an empty group that it makes and removes: limits.Try. It opens the driver's library for each request and closes it, so that it is not in the
// way of a reset or of an update of the driver, and asks it for the GPU of the request only.
//
//	client leaves . . . . . . the limit is set if that is begun within the time that the request has, half of the client's, and not at all later
//	server gets TERM  . . . . it ends after the request that it serves
//	server is killed  . . . . the agent does not know whether the limit was set, and reads it
//	a GPU hangs . . . . . . . requests for it fail, those for others go on; the driver is closed when the call has returned
//	the driver hangs  . . . . the request fails, and the process ends with an error, because its library is of no more use: it is to be started again. So it does if
//	                          the call about a GPU has not returned when the driver is released for a reset
package limitserver
