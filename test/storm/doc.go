// Package storm is one machine in a storm of random faults: calls that fail, hang or crawl, XIDs and floods of
// events, GPUs that are lost, pulled and exchanged, a driver that is unloaded and loaded anew, kubelets that
// crash, streams that are cancelled, MPS daemons that die. One of the two machines has a policy: exclusive GPUs and
// instances, shares by time-slicing and by MPS, a GPU that is kept back. Both adapters serve their real protocols
// all the while. Whatever happens, in whatever order: no stream ends by itself, no GPU that is known to be broken is
// offered, no GPU that nothing happened to is withdrawn, both orchestrators hear the same, the shares of a device are
// all alike, requests are answered at once, and after a calm everything is well and nothing has grown.
//
//	plan (from a seed) - runner -> simulated machine -> session -> monitor -> adapters -> orchestrators
//	                       |                                                                 |
//	                       '- truth: what is broken, since when ----- judge ----- what they were told
//
// Truth is a small model of the machine with times; it knows nothing of the product's rules. A claim ("this GPU
// must not be offered now") is made only where it is beyond doubt.
//
// Another storm has both agents, each in a process of its own as they are on a host, under rules by index and count that split
// the machine: GPUs come, go and change their order, agents end, are killed, can open no file, and find the history or the whole
// state directory of another machine, and the wall clock jumps. What must hold: in an era, which ends when an operator orders to
// bind anew or changes the policy, a device is in one pool of one agent; no GPU of another machine is taken for a lost one;
// nothing of a good history is lost.
//
//	plan (from a seed) - runner -> simulated machine -> two agents -> each inventory -> deals: who has what, since which era
//
// A run has rounds: a storm, then a calm in which everything is lifted and an operator resets what needs it. The
// default is short. A long one is asked for by the environment:
//
//	TANDEM_STORM_FAULTS=10000   faults of a test
//	TANDEM_STORM_FOR=30m        for which they last, at least
//	TANDEM_STORM_SEED=1         which faults, where and when; a run prints its seed
//	TANDEM_STORM_SLACK=2        factor on all bounds, for a machine that is slow
//	TANDEM_STORM_WITHOUT=lost,pulled   kinds of faults to leave out, to find out which it takes
package storm
