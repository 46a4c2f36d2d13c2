// Package health holds the whole chain of health, from a libnvidia-ml.so.1 to what an orchestrator is told,
// against scripted machines. Each test is a case; cases have fixed numbers:
//
//	 1 start with a driver that hangs        18 units that share a GPU
//	 2 a verdict before the start            19 no events
//	 3 application XIDs                      20 the older event wait
//	 4 three workloads                       21 restart, reboot, trouble with the state file
//	 5 XID 95, then a reset                  22 weak signs of a reset
//	 6 XID 95, verdict none                  23 driver reload
//	 7 XID 94                                24 too many recoveries
//	 8 row remap                             25 a storm of XIDs
//	 9 row remap failure                     26 fabric
//	10 lost                                  27 slowdown
//	11 a lookup that blames the wrong GPU    28 PCIe width
//	12 lost and back                         29 driver unbound and bound
//	13 hang                                  30 one publication a fault
//	14 the hang ends                         31 kernel log
//	15 every verdict                         32 random stories
//	16 vGPU guest                            33 every XID and event
//	17 MIG scopes                            34 fuzz targets
//	                                         35 replicas
//
// Some differ from what their names promise. 13: there is no state for slow, and a GPU that hangs never makes
// the others stale, because each has a lane of its own. 18: the instances of a GPU are what is shared there,
// replicas are in 35. 29: letting go of the driver on request does not exist yet; what a reload or a rebind by
// others proves is tested. 32 to 34 are what goes through the driver; the pure parts have their own tests.
//
// Most cases are driven by hand: a real session of the simulated driver is asked at the pace of the policy
// and folded into a state whose clock belongs to the test, so an hour passes in a moment and no test waits.
// Cases about goroutines, hangs and promises in real time run the monitor with short durations.
package health
