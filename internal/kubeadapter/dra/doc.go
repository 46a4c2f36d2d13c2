// Package dra is a kubelet plugin for Dynamic Resource Allocation (DRA) over an inventory, under the name of NVIDIA's driver.
//
// The scheduler allocates a device to a resource claim, by what the ResourceSlices of the node have. The kubelet calls Prepare when a pod
// of the claim starts, and Unprepare when the last one has ended. The answer of Prepare is names of CDI devices.
//
//	inventory, prepared claims  ->  Desired (devices of the slices), Health (messages for the kubelet)
//	Prepare    claim from the API server, devices reserved, record on disk, answer
//	Unprepare  record removed
//
// What is prepared is in one file for each claim (package prepared). A repeated Prepare is answered from it, and Unprepare needs nothing
// else: a pod whose claim can't be unprepared never ends.
//
// One gRPC server on one socket has all services: registration, DRA v1 and v1beta1, health v1 and v1alpha1. The kubelet finds the socket
// in its folder plugins_registry and calls GetInfo; nothing has to be called by the plugin. The name of the socket is another one in each
// process, so that two agents can run during an update: the kubelet calls the one that registered last.
//
// No call waits for the driver, and none takes longer than the 45 s that the kubelet waits. A goroutine that hangs on a disk holds the
// lock of its claim only.
package dra
