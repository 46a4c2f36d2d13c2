// Package publisher keeps the ResourceSlices of a node in the Kubernetes API equal to the devices that the node has.
//
// One goroutine owns all state and writes: desired devices come from a watch.Value, cached slices from a second goroutine that lists
// and watches. Each change of either is followed by a comparison, field by field, and by the writes that it asks for, so that a slice
// which another client deletes or changes is restored. The kubelet deletes all slices of a node at each of its starts; they are back as soon as
// the events of that arrive.
//
//	devices ---------> compare ---> create, update, delete ---> API server
//	                      ^                   |                     |
//	                      |     answers       v                     |
//	                   cached slices <--------+---- list, watch <---+
//
// A taint that keeps pods away is written first and by itself, into the slices as they are: it waits for no other request. What fails keeps nothing
// else from being published, and is tried again: the Node, slices of others, a device that the server refuses.
//
// Slices have fixed names, so that a write whose answer was lost is never repeated as a second slice. Nothing is deleted when the agent
// stops: the kubelet deletes the slices of a driver that does not come back within 30 s.
package publisher
