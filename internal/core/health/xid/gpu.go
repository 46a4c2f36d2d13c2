package xid

// contained are the XIDs that affect one context, or a part of the GPU that the rest does not need.
var contained = []ruleGroup{
	{Rule: Rule{
		Class: Contained, Effect: Degrades,
		Clears: NoRecoveryAction | LevelClear | ResetSeen | Reboot, Level: LevelMemoryRepair,
		Action: "reset the GPU when it is convenient",
	}, codes: []codeEntry{
		{63, "INFOROM_DRAM_RETIREMENT_EVENT", "memory row or page retired, active after a reset", 565, "IGNORE", "IGNORE"},
	}},
	{Rule: Rule{Class: Contained, Effect: Degrades, Clears: Quiet | Reboot, Action: "watch; if it persists, contact support"}, codes: []codeEntry{
		{92, "EXCESSIVE_SBE_INTERRUPTS", "many corrected memory errors", 0, "IGNORE", "CONTACT_SUPPORT"},
		{176, "PCIE_CORRECTABLE_ERROR_FAULT", "many corrected PCIe errors", 0, "", ""},
	}},
	{Rule: Rule{
		Class: Contained, Effect: Degrades, Clears: NoRecoveryAction | ResetSeen | Reboot,
		Action: "restart the application; reset when convenient",
	}, codes: []codeEntry{
		{94, "ROBUST_CHANNEL_CONTAINED_ERROR", "contained memory error", 565, "RESTART_APP", "IGNORE (sympathetic)"},
	}},
	{Rule: Rule{Class: Contained, Effect: Degrades, Action: "plan to replace the GPU"}, codes: []codeEntry{
		{157, "RESOURCE_RETIREMENT_FAILURE", "no spare resource left for a repair", 0, "IGNORE", "CONTACT_SUPPORT"},
		{161, "CHANNEL_RETIREMENT_FAILURE", "no spare memory channel left for a repair", 575, "IGNORE", "INVESTIGATE_SW"},
	}},
	{Rule: Rule{
		Class: Contained, Effect: Degrades,
		Clears: LevelClear | ResetSeen | Reboot, Level: LevelResourceRepair,
		Action: "reset the GPU when it is convenient",
	}, codes: []codeEntry{
		{160, "CHANNEL_RETIREMENT_EVENT", "memory channel repair, active after a reset", 575, "IGNORE", "INVESTIGATE_SW"},
	}},
	{Rule: Rule{Class: Contained, Effect: Degrades, Clears: ResetSeen | Reboot, Action: "enable ECC and reset the GPU"}, codes: []codeEntry{
		{168, "REDUCED_GPU_MEMORY_CAPACITY", "less memory than the GPU should have", 0, "", ""},
	}},

	// The driver reports a pending change that a reset completes, but NVML has no known flag for it.
	{Rule: Rule{Class: Contained, Effect: Degrades, Clears: ResetSeen | Reboot, Action: "reset the GPU when it is convenient"}, codes: []codeEntry{
		{177, "BANK_REMAPPING_EVENT", "memory bank remap, active after a reset", 0, "", ""},
		{185, "SPARING_EVENT", "spare hardware put to use", 0, "", ""},
	}},
}

// resets are the XIDs after which only a reset makes the GPU usable.
var resets = []ruleGroup{
	{Rule: Rule{Class: Reset, Effect: Withdraws, Clears: ResetSeen | Reboot, Action: "drain and reset the GPU"}, codes: []codeEntry{
		{46, "ROBUST_CHANNEL_GPU_TIMEOUT_ERROR", "GPU engine timeout", 0, "RESET_GPU", "CONTACT_SUPPORT"},
		{62, "PMU_HALT_ERROR", "PMU firmware halted", 565, "RESET_GPU", "CONTACT_SUPPORT"},
		{119, "GSP_RPC_TIMEOUT", "GSP firmware does not answer", 0, "RESET_GPU", "INVESTIGATE_SW"},
		{120, "GSP_ERROR", "GSP firmware crashed", 565, "RESET_GPU", "INVESTIGATE_SW"},
		{140, "UNRECOVERABLE_ECC_ERROR_ESCAPE", "uncorrectable error that could not be retired", 0, "RESET_GPU", "CONTACT_SUPPORT"},
		{143, "GPU_INIT_ERROR", "GPU failed to initialise", 575, "RESET_GPU", "CONTACT_SUPPORT"},
		{158, "GPU_FATAL_TIMEOUT", "fatal GPU timeout", 1, "RESET_GPU", "CONTACT_SUPPORT"},
		{167, "PCIE_FATAL_TIMEOUT", "fatal PCIe timeout", 0, "", ""},
		{169, "SEC2_HALT_ERROR", "SEC2 firmware halted", 0, "", ""},
		{175, "MEMORY_SUBSYSTEM_ERROR", "memory subsystem does not answer", 0, "", ""},
	}},
	{Rule: Rule{Class: Reset, Effect: Withdraws, Clears: NoRecoveryAction | ResetSeen | Reboot, Action: "drain and reset the GPU"}, codes: []codeEntry{
		{48, "ROBUST_CHANNEL_GPU_ECC_DBE", "uncorrectable memory error", 565, "WORKFLOW_XID_48", "WORKFLOW_XID_48"},
		{95, "ROBUST_CHANNEL_UNCONTAINED_ERROR", "uncontained memory error", 565, "RESET_GPU", "IGNORE (sympathetic)"},
		{156, "RESOURCE_RETIREMENT_EVENT", "hardware repair recorded, active after a reset", 565, "RESET_GPU", "IGNORE"},
		{171, "UNCORRECTABLE_DRAM_ERROR", "uncorrectable DRAM error", 0, "", ""},
		{172, "UNCORRECTABLE_SRAM_ERROR", "uncorrectable SRAM error", 0, "", ""},
	}},
	{Rule: Rule{Class: Reset, Effect: Withdraws, Clears: ResetSeen | Reboot, Action: "drain and reset; if it returns, replace the GPU"}, codes: []codeEntry{
		{64, "INFOROM_DRAM_RETIREMENT_FAILURE", "memory row or page could not be retired", 565, "RESET_GPU", "CONTACT_SUPPORT"},
	}},
	{Rule: Rule{Class: Reset, Effect: Withdraws, Clears: ResetSeen | Reboot, Action: "drain and reset; if it returns, power-cycle"}, codes: []codeEntry{
		{110, "SEC_FAULT_ERROR", "security fault", 565, "RESET_GPU", "INVESTIGATE_SW"},
	}},

	// Harmless where neither UVM nor vGPU is in use, which only the driver can determine.
	{Rule: Rule{
		Class: Reset, Effect: Degrades, SettledEffect: Withdraws, Clears: NoRecoveryAction | ResetSeen | Reboot,
		Action: "drain and reset the GPU",
	}, codes: []codeEntry{
		{159, "ROBUST_CHANNEL_CHI_NON_DATA_ERROR", "error on the link to the CPU", 1, "CHECK_UVM", "SYMPATHETIC_REPORT_SOLO"},
	}},
}

// nodes are the XIDs for which a reset of the GPU is not enough.
var nodes = []ruleGroup{
	{Rule: Rule{Class: Node, Effect: Withdraws, Clears: Reboot, Action: "connect the GPU's auxiliary power"}, codes: []codeEntry{
		{54, "SILENT_RUNNING_PWR_REDUCED_CLOCKING", "auxiliary power not connected", 0, "CHECK_MECHANICALS", "CONTACT_SUPPORT"},
	}},
	{Rule: Rule{Class: Node, Effect: Loses, Clears: ResetSeen | Reboot, Action: "reboot the node"}, codes: []codeEntry{
		{79, "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS", "GPU has fallen off the bus", 565, "RESTART_BM", "CONTACT_SUPPORT"},
	}},
	{Rule: Rule{Class: Node, Effect: Withdraws, Clears: Reboot, Action: "restart the virtual machine"}, codes: []codeEntry{
		{151, "ROBUST_CHANNEL_KEY_ROTATION_ERROR", "confidential-computing key rotation failed", 0, "RESTART_VM", "CONTACT_SUPPORT"},
	}},
}
