package xid

// events are the rules for the NVML event types that are faults by themselves (nvml.h, nvmlEventType), in order of
// type. All but one correspond to an XID.
var events = []Rule{
	ruleLike(92, 0x200, "nvmlEventTypeSingleBitEccErrorStorm"),
	ruleLike(63, 0x400, "nvmlEventTypeDramRetirementEvent"),
	ruleLike(64, 0x800, "nvmlEventTypeDramRetirementFailure"),
	ruleLike(94, 0x1000, "nvmlEventTypeNonFatalPoisonError"),
	ruleLike(95, 0x2000, "nvmlEventTypeFatalPoisonError"),
	// The driver raises it when the GPU falls off the bus and when GSP firmware stops responding, for which NVML may
	// report no XID.
	{
		Code: 0x4000, Name: "nvmlEventTypeGpuUnavailableError", Meaning: "GPU is unavailable",
		Class: Reset, Effect: Withdraws, SettledEffect: Withdraws, Clears: ResetSeen | Reboot,
		Action: "reset the GPU or reboot the node",
	},
}

// ruleLike returns the rule of an XID as that of an event. NVIDIA's catalogue has no recommendations for events.
func ruleLike(xid, kind uint64, name string) Rule {
	r := XID(xid)
	r.Code, r.Name, r.Immediate, r.Investigatory = kind, name, "", ""
	return r
}
