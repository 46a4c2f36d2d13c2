package xid

// The NVML event types that are faults by themselves (nvml.h, nvmlEventType).
const (
	singleBitStorm        = 0x200
	dramRetirement        = 0x400
	dramRetirementFailure = 0x800
	nonFatalPoison        = 0x1000
	fatalPoison           = 0x2000
	gpuUnavailable        = 0x4000
)

// eventRules returns the rules for events, in order of type. All but one correspond to an XID.
func eventRules() []Rule {
	return []Rule{
		ruleLike(92, singleBitStorm, "nvmlEventTypeSingleBitEccErrorStorm"),
		ruleLike(63, dramRetirement, "nvmlEventTypeDramRetirementEvent"),
		ruleLike(64, dramRetirementFailure, "nvmlEventTypeDramRetirementFailure"),
		ruleLike(94, nonFatalPoison, "nvmlEventTypeNonFatalPoisonError"),
		ruleLike(95, fatalPoison, "nvmlEventTypeFatalPoisonError"),
		// The driver raises it when the GPU falls off the bus and when GSP firmware stops responding, for which NVML
		// may report no XID.
		{
			Code: gpuUnavailable, Name: "nvmlEventTypeGpuUnavailableError", Meaning: "GPU is unavailable",
			Class: Reset, Effect: Withdraws, SettledEffect: Withdraws, Clears: ResetSeen | Reboot,
			Action: "reset the GPU or reboot the machine",
		},
	}
}

// ruleLike returns the rule of an XID as that of an event. NVIDIA's catalogue has no recommendations for events.
func ruleLike(xid, kind uint64, name string) Rule {
	r := XID(xid)
	r.Code, r.Name, r.Immediate, r.Investigatory = kind, name, "", ""
	return r
}
