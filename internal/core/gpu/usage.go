package gpu

import "time"

// Usage is the present utilisation of one device. What the device does not report is unset. The power limit and the ECC counters
// were read up to 10 s before At.
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

	Processes *[]Process // with memory of the device, by PID; nil = unknown. Not to be changed
}

// OptionalUint64 is a number that a device may not report. The zero value is unset.
type OptionalUint64 struct {
	Value uint64
	OK    bool
}

// OptionalUint64Of returns v as a number that is set.
func OptionalUint64Of(v uint64) OptionalUint64 { return OptionalUint64{Value: v, OK: true} }
