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
package nomadadapter
