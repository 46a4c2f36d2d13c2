package nvidia

import "github.com/tandem-gpu/tandem/internal/core"

// wellH100 is what a GPU of the machine h100x8 says.
var wellH100 = core.Vitals{
	Verdict:      core.VerdictNone,
	RemapPending: core.No, RemapFailed: core.No, RepairPending: core.No, Unrepairable: core.No,
	SRAMThreshold: core.No, InfoROMCorrupt: core.No,
	Uncorrectable: core.GaugeOf(0), Energy: core.GaugeOf(1843200_000), Replays: core.GaugeOf(0),
	ThermalSlowdown: core.GaugeOf(0), PowerBrake: core.GaugeOf(0),
	PCIeWidth: 16, PCIeMaxWidth: 16, PCIeGen: 5,
	LinksUp: core.GaugeOf(18), Fabric: core.FabricWell, Events: core.Yes,
}
