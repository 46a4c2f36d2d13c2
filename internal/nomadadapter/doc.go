// Package nomadadapter speaks Nomad's device plugin dialect over a source of inventories: a fingerprint
// is an inventory in Nomad's words, a reservation is a core.Plan in Nomad's words.
//
// What Nomad 1.11 makes of an answer shapes everything here (client/devicemanager/instance.go):
//
//   - An error on the fingerprint stream, or its end, is final: the client drops the devices and never
//     asks again until the agent restarts. So nothing here ends or fails a stream; a lost driver is an
//     inventory like any other. The end of the process, however, is healed by a new one at once.
//   - A plugin that stays silent holds up the start of the client by 50 s. So the first fingerprint
//     leaves within a second, empty if need be.
//   - The process is started three times for one start of the agent, and SetConfig is called twice in
//     the second of them. So the source starts with the first question about devices, not before.
//   - The scheduler remembers by a node's computed class whether it has the devices (scheduler/feasible,
//     FeasibilityWrapper), and health is not part of the class (nomad/structs/node_class.go): a node with too
//     few healthy devices would hide the others of its class from a job, and its recovery would not unblock it
//     (nomad/blocked_evals.go). So a group with unhealthy devices has an attribute that counts them, and the
//     node is of another class while it is sick.
//   - Reserve has no context and no deadline, and a nil reservation panics the agent.
//
// # Groups
//
// A job names a group's type, its vendor and type, or those and its name, and gets all its devices from one group,
// taken by chance (scheduler/feasible, createOffer). So everything that a job must be able to tell apart, or to have
// together, is a group:
//
//   - How devices are shared is the type: "gpu" for one's own, "gpu-shared" for time slices, "gpu-mps" for MPS. No
//     request for a GPU is matched by a share.
//   - What they are is the name: the model's, or that of the pool if the policy gave it one. A pool with a name is one
//     group whatever is in it, and two pools are never one group.
//   - Where they are ends the name, if group_by says so: " NUMA 0", " NVLink 0000:17:00.0". A job that asks for
//     "nvidia/gpu" with count = 4 gets four of one node or island; one that used to name the model asks for
//     ${device.attr.product} instead, since the names of groups are longer now.
//
// A name outlives its devices, and the process: allocations are booked under it, and are forgotten under another. So names
// and the places of GPUs are kept in the state directory (see KeepNames).
//
// # MPS
//
// A client of an MPS control daemon finds it by CUDA_MPS_PIPE_DIRECTORY, which is a path on the host. A raw_exec task
// needs no more; one of the docker driver mounts the directory under the same path, and shares the daemon's /dev/shm:
//
//	config {
//	  volumes  = ["/run/nvidia/mps:/run/nvidia/mps"]
//	  ipc_mode = "host"
//	}
//
// and one of the exec driver has it by a volume_mount of a host volume there. The plugin mounts nothing, because Nomad
// would drop the task's own volumes in favour of its mounts.
package nomadadapter
