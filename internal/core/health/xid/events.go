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

// eventRules are the rules for events, in order of type. All but one are another form of an XID.
func eventRules() []Rule {
	return []Rule{
		ruleLike(92, singleBitStorm, "nvmlEventTypeSingleBitEccErrorStorm"),
		ruleLike(63, dramRetirement, "nvmlEventTypeDramRetirementEvent"),
		ruleLike(64, dramRetirementFailure, "nvmlEventTypeDramRetirementFailure"),
		ruleLike(94, nonFatalPoison, "nvmlEventTypeNonFatalPoisonError"),
		ruleLike(95, fatalPoison, "nvmlEventTypeFatalPoisonError"),
		// The driver raises it when the GPU falls off the bus and when GSP firmware stops answering, which may
		// not reach NVML as XIDs.
		{
			Code: gpuUnavailable, Name: "nvmlEventTypeGpuUnavailableError", Meaning: "GPU is unavailable",
			Class: Reset, Effect: Withdraws, SettledEffect: Withdraws, Clears: ResetSeen | Reboot,
			Action: "reset the GPU or reboot the machine",
		},
	}
}

// ruleLike is the rule of an XID for an event; NVIDIA gives no advice on events.
func ruleLike(xid, kind uint64, name string) Rule {
	r := XID(xid)
	r.Code, r.Name, r.Immediate, r.Investigatory = kind, name, "", ""
	return r
}
