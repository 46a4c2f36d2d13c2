// Package gpu has the devices of a node as the driver reports them: identity, placement, readings, usage and errors.
//
//	DeviceID    NVML UUID of a GPU or MIG instance
//	Placement   where something is: the node, a GPU, a GPU instance, a compute instance
//	Device      one GPU or MIG instance
//	Snapshot    one complete reading of the node
//	Usage       utilisation, memory, power and temperature of one device
//
// All types are values; nothing here does I/O.
package gpu
