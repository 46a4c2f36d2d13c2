// Package kubeadapter speaks the kubelet's dialect (device plugin v1beta1) for an inventory.
//
// A pool of the inventory is a resource: "gpu.shared" is nvidia.com/gpu.shared. A unit is a device ID, and units of a
// device that is shared are "UUID::0", "UUID::1" ..., as NVIDIA's k8s-device-plugin spells them.
//
// One endpoint per resource name follows the kubelet through its restarts. An endpoint lives in
// incarnations, each with a server and a socket of its own:
//
//	wait until kubelet.sock accepts
//	listen on a fresh socket, serve, register      the kubelet dials back inside Register
//	hold                                           until the kubelet's stream ends, our socket or the
//	                                               kubelet's is replaced, or serving fails
//	stop, remove the socket, rest, again
//
// The rest is short after a Register that was refused, and grows; it is a second at least when the kubelet
// may have the incarnation in its books; and it ends when another kubelet comes, which knows of nothing.
//
// The ListAndWatch stream is the heartbeat of a registration: the kubelet never reconnects and never
// asks twice, so when the stream ends, that incarnation is over. A socket name is never used twice,
// because kubelet 1.37 corrupts its books when a path registers again while it counts as connected; and
// an incarnation is gone before the next one registers, because kubelets up to 1.36 tear down the new
// one when the stream of the old one ends.
//
// File events only say "look again", and looks go by the identity of a socket: a late event, or two, is no
// restart. Without file events the looks are more frequent.
package kubeadapter
