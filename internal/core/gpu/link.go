package gpu

// Link is the connection between two GPUs.
type Link struct {
	A, B       DeviceID
	Path       PCIePath
	NVLinks    int              // active NVLinks between the two, directly or through NVSwitch
	Generation NVLinkGeneration `json:"NVLinkGeneration,omitempty"` // of the NVLinks: the lower one of the two GPUs
	NVSwitch   bool             `json:",omitempty"`                 // all of the NVLinks go through NVSwitches
}

// NVLinkGeneration is the generation of an NVLink: 1 (Pascal) to 6. The zero value is unknown. A link has 20 GB/s in
// each direction in generation 1, 25 GB/s in 2 to 4, and 50 GB/s in 5 and 6.
type NVLinkGeneration uint8

// PCIePath is the nearest common ancestor of two GPUs in the PCIe topology (nvmlGpuTopologyLevel_t). A larger
// value is a shorter path. The zero value is unknown.
type PCIePath uint8

// PCIe paths, from far to near.
const (
	PathUnknown      PCIePath = iota
	PathSystem                // across NUMA nodes
	PathNUMA                  // across host bridges of one NUMA node
	PathHostBridge            // one host bridge
	PathMultiSwitch           // several PCIe switches
	PathSingleSwitch          // one PCIe switch
	PathBoard                 // one board
)
