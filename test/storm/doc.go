// Package storm injects random faults into a simulated machine while agents run on it: calls that fail, hang or are slow, XIDs and
// many events at once, GPUs that are lost, removed and replaced, a driver that is unloaded and reloaded, kubelets that crash, streams that
// are cancelled, MPS daemons that end. It checks invariants all the time, whatever the order of the faults.
//
// TestStorm and TestStormOnMIG have one agent, in this process, with both adapters behind their real protocols. No stream ends by
// itself, no GPU that is known to be faulty is offered, no GPU without a fault is withdrawn, both orchestrators have the same, all shares of
// a device have the same health, no XID counts more often than it was raised, of equally bad conditions the health is one that only an operator
// clears if there is one, and requests are answered within a limit. TestStormOnMIG has a policy: exclusive GPUs and instances, shares
// by time-slicing and by MPS, a reserved GPU.
//
//	plan (from a seed) -> simulated machine -> session -> monitor -> adapters -> orchestrators
//	  |                                                                             |
//	  '-> expectedState: faults and their times ----------> check <------------ what they have
//
// expectedState is a small model of the machine; it has none of the product's rules, and requires that a GPU is not offered only where
// that is certain.
//
// TestStormOfTwoAgents has both agents, each in a process of its own, with a policy by index and count that divides the machine: GPUs
// are removed, added and reordered, agents end, are killed, can't open files, and find the history or the state directory of another
// machine; files of agents are damaged, of a later version, unreadable and locked; the wall clock jumps. In a period, which a rebind or another policy ends, a device is in one pool of one agent; no GPU of
// another node is listed as lost; nothing of a valid history is lost.
//
//	plan (from a seed) -> simulated machine -> two agents -> inventories -> assignments: who offers what, by period
//
// The random tests of single parts, which make storm runs, too: internal/kubeadapter/deviceplugin (kubelets that restart, pods with init containers),
// internal/kubeadapter/dra (policies that change between allocation and Prepare) and its publisher (refusals of the API server: 400, 413, 422),
// internal/nomadadapter/agentapi (tokens that expire or lose namespaces).
//
// A run has rounds: faults, then a quiet period without any, in which an operator resets or replaces what does not recover by
// itself. The default is short. Environment:
//
//	TANDEM_STORM_FAULTS=10000   faults of a test
//	TANDEM_STORM_FOR=30m        minimum duration of a test
//	TANDEM_STORM_SEED=1         decides which faults, where and when; a run prints its seed
//	TANDEM_STORM_SLACK=2        factor of all time limits, for a slow machine
//	TANDEM_STORM_WITHOUT=lost,removed   kinds of faults to leave out, to find out which are needed
package storm
