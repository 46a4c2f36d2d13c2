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
//   - Reserve has no context and no deadline, and a nil reservation panics the agent.
package nomadadapter
