// Package nomadadapter implements Nomad's device plugin API over a source of inventories: a fingerprint lists the units of
// an inventory in device groups, a reservation is an inventory.Plan.
//
// Nomad 1.11's device manager (client/devicemanager/instance.go) sets these requirements:
//
//   - An error on the fingerprint stream, or its end, is final: the client removes the devices and fingerprints no more
//     until the agent restarts. So no stream here ends or fails; a lost driver is an inventory like any other. If the
//     process ends, Nomad starts another one immediately.
//   - A plugin that sends no fingerprint delays the start of the client by 50 s. So the first fingerprint is sent after
//     firstFingerprintTimeout at the latest, empty if need be.
//   - Nomad starts the process three times for one start of the agent, and calls SetConfig twice in the second. So the
//     source is started by the first call that concerns devices.
//   - The scheduler caches per computed node class whether a node has the devices (scheduler/feasible,
//     FeasibilityWrapper), and health is not part of the class (nomad/structs/node_class.go): a node with too few healthy
//     devices would exclude the other nodes of its class, and its recovery would unblock no evaluation
//     (nomad/blocked_evals.go). So a group with unhealthy devices has an attribute that counts them, which changes the
//     node's class.
//   - Reserve has no context and no deadline, and a nil reservation panics the agent.
//
// # Groups
//
// A job requests a group's type, its vendor and type, or those and its name, and gets all its devices from one group,
// chosen at random (scheduler/feasible, createOffer). So units are in one group only if a job may get any of them:
//
//   - The type is how devices are shared: "gpu" for exclusive use, "gpu-shared" for time slices, "gpu-mps" for MPS. A
//     request for "gpu" never gets a share.
//   - The name is the model's, or that of the pool if the policy names it. A pool with a name is one group whatever
//     devices it has, and two pools are never one group.
//   - With group_by the name ends with the NUMA node or NVLink island: " NUMA 0", " NVLink 0000:17:00.0". A job that
//     requests "nvidia/gpu" with count = 4 gets four of one node or island. Since these names are longer, a job selects
//     the model by a constraint on ${device.attr.product}.
//
// Nomad records allocations under a group's name and loses them under another one, so a name stays the same while devices
// are absent and after a restart: names, and the NUMA nodes or islands of GPUs, are saved in the state directory (see
// Plugin.PersistGroups).
//
// # Injection
//
// The plugin does not know the driver of a task, so what a reservation has depends on the pool (inventory.Injection). Nomad's
// drivers take different parts of it:
//
//   - docker: variables, nodes and mounts. If NVIDIA_VISIBLE_DEVICES is among the variables it requires NVIDIA's runtime, and
//     fails without it (drivers/docker/driver.go). It has no CDI.
//   - exec, java: variables, nodes and mounts.
//   - raw_exec: variables.
//   - podman (nomad-driver-podman): variables and mounts, and CDI devices that the job names by the variable CDI_DEVICES.
//
// Only variables outlive the Nomad agent: a task that restarts after a restart of the agent has no nodes and no mounts
// (hashicorp/nomad#9473). With mounts Nomad drops the volume_mounts of the task at its first start.
//
// # MPS
//
// A client of an MPS control daemon finds it by CUDA_MPS_PIPE_DIRECTORY, which is a path on the host. A raw_exec task
// needs no more; a task of the docker or podman driver mounts the directory under the same path, and shares the daemon's /dev/shm:
//
//	config {
//	  volumes  = ["/run/nvidia/mps:/run/nvidia/mps"]
//	  ipc_mode = "host"
//	}
//
// From Nomad 2.0.4 on, the client's docker plugin must allow that mode. A task of the exec driver uses volume_mounts of host
// volumes. The plugin returns no mounts, because Nomad would drop the task's own volumes in favour of them, unless the pool's
// injection has mounts anyway.
package nomadadapter
