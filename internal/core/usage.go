package core

import "time"

// Usage is what one device is doing now. What the device does not report is an unset Gauge.
type Usage struct {
	Device      DeviceID
	At          time.Time // when its reading began; zero = the device did not answer
	Power       Gauge     // milliwatts drawn
	PowerLimit  Gauge     // milliwatts
	GPU         Gauge     // percent of the last sample period with a kernel running
	Memory      Gauge     // percent of the last sample period with memory traffic
	Encoder     Gauge     // percent
	Decoder     Gauge     // percent
	Temperature Gauge     // degrees Celsius
	MemoryUsed  Gauge     // bytes
	MemoryTotal Gauge     // bytes
	BAR1Used    Gauge     // bytes
	BAR1Total   Gauge     // bytes
	ECCL1       Gauge     // volatile corrected errors since the driver was loaded
	ECCL2       Gauge     // the same
	ECCMemory   Gauge     // the same
}

// Gauge is a number that a device may not have. The zero value is unset.
type Gauge struct {
	Value uint64
	OK    bool
}

// GaugeOf is a gauge that is set.
func GaugeOf(v uint64) Gauge { return Gauge{Value: v, OK: true} }
