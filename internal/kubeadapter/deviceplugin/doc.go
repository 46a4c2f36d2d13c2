// Package deviceplugin is a kubelet device plugin (API v1beta1) over an inventory.
//
// A pool of the inventory is an extended resource: the pool "gpu.shared" is nvidia.com/gpu.shared. A unit is a device ID. The
// units of a shared device are "UUID::0", "UUID::1" and so on, as in NVIDIA's k8s-device-plugin.
//
// Each resource has one endpoint, which registers again after each restart of the kubelet. A registration has a gRPC
// server and a socket of its own:
//
//	wait until kubelet.sock accepts connections
//	listen on a new socket, serve, call Register    the kubelet connects to the socket before it answers
//	supervise                                       until the kubelet's stream ends, the plugin's or the kubelet's
//	                                                socket is replaced, or serving fails
//	stop the server, remove the socket, wait, repeat
//
// The wait starts at 100 ms and grows while Register fails. It is at least 1 s if the kubelet may have a record of the
// registration. It ends early when another kubelet starts, which has no record of any.
//
// The ListAndWatch stream shows that a registration is valid: the kubelet never reopens it, so the registration ends with the
// stream. A socket name is never used twice, because kubelet 1.37 corrupts its plugin records when a path registers again
// while it counts as connected. A registration ends before the next one registers, because kubelets up to 1.36 disconnect
// the new plugin when the stream of the old one ends.
//
// inotify events only trigger a check of the sockets. A check compares device, inode and modification time, so a late or
// repeated event does not restart a registration. Without inotify the sockets are checked more often.
package deviceplugin
