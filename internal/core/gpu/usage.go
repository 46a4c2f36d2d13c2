package gpu

import "time"

// Usage is the present utilisation of one device. What the device does not report is unset. The power limit, the clocks and all
// counters were read up to 10 s before At.
type Usage struct {
	Device      DeviceID
	At          time.Time      // when reading it began; zero = the device did not respond
	Power       OptionalUint64 // milliwatts drawn
	PowerLimit  OptionalUint64 // milliwatts
	GPU         OptionalUint64 // percent of the last sample period with a kernel running
	Memory      OptionalUint64 // percent of the last sample period with memory traffic
	Encoder     OptionalUint64 // percent
	Decoder     OptionalUint64 // percent
	Temperature OptionalUint64 // degrees Celsius
	MemoryUsed  OptionalUint64 // bytes
	MemoryTotal OptionalUint64 // bytes
	BAR1Used    OptionalUint64 // bytes
	BAR1Total   OptionalUint64 // bytes
	ECCL1       OptionalUint64 // volatile corrected errors since the driver was loaded
	ECCL2       OptionalUint64 // as ECCL1
	ECCMemory   OptionalUint64 // as ECCL1

	// Only GPUs have these; a MIG instance has none.
	ECCUncorrected    OptionalUint64 // volatile errors of all memories, as ECCL1
	ClockSM           OptionalUint64 // MHz
	ClockMemory       OptionalUint64 // MHz
	PCIeTransmitted   OptionalUint64 // bytes from the GPU; can wrap
	PCIeReceived      OptionalUint64 // bytes to the GPU; can wrap
	PCIeReplays       OptionalUint64 // since the last reset
	PCIeGeneration    OptionalUint64 // of the link, at the latest health check that read it: up to a minute before
	PCIeWidth         OptionalUint64 // lanes, as PCIeGeneration
	NVLinks           OptionalUint64 // active, at the latest health check that read them: up to five minutes before
	NVLinkTransmitted OptionalUint64 // KiB of data over all links
	NVLinkReceived    OptionalUint64 // KiB of data over all links
	NVLinkCRCErrors   OptionalUint64 // of flits, over all links
	NVLinkReplays     OptionalUint64 // over all links
	NVLinkRecoveries  OptionalUint64 // over all links

	Processes *[]Process // with memory of the device, by PID; nil = unknown. Not to be changed
}

// OptionalUint64 is a number that a device may not report. The zero value is unset.
type OptionalUint64 struct {
	Value uint64
	OK    bool
}

// OptionalUint64Of returns v as a number that is set.
func OptionalUint64Of(v uint64) OptionalUint64 { return OptionalUint64{Value: v, OK: true} }
