// Package resetserver resets GPUs for the agents of a node that have no rights for it, as on Kubernetes: a component of its own has the rights that
// nvidia-smi needs, and the agents keep none.
//
//	agent                                          component, root on the node
//	Client --- POST, JSON --- <state dir>/reset.sock --- Server --- gpureset.Local --- nvidia-smi
//
// It is a component as package component describes them: it resets a GPU only if by the file of the node an agent has taken it for a reset, so that no API gives
// it out, and if no process has it open.
//
//	client leaves . . . . . . the reset that it has asked for goes on
//	server gets TERM  . . . . it takes no request more, and ends after the reset that runs
//	server is killed  . . . . nvidia-smi ends with its container; the agent counts an attempt, and restores the persistence mode later
package resetserver
