package xid

// fabric are the XIDs of links. Each may be the consequence of a fault at the other end, or harmless: NVLink 5 has
// the severity in sub-fields that are only in the kernel log, not in NVML. So most of them wait for the driver's
// recovery action. Links that are still down when the fault is over are a separate condition.
var fabric = []ruleGroup{
	{Rule: Rule{
		Class: Fabric, Effect: Degrades, SettledEffect: Withdraws, NVLinkOnly: true,
		Clears: NoRecoveryAction | ResetSeen | Reboot, Action: "drain and reset the GPU",
	}, codes: []codeEntry{
		{74, "NVLINK_ERROR", "NVLink error", 565, "WORKFLOW_NVLINK_ERR", "CONTACT_SUPPORT"},
	}},
	{Rule: Rule{
		Class: Fabric, Effect: Degrades, SettledEffect: Withdraws,
		Clears: NoRecoveryAction | ResetSeen | Reboot, Action: "drain and reset the GPU",
	}, codes: []codeEntry{
		{144, "NVLINK_SAW_ERROR", "NVLink 5 SAW error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{145, "NVLINK_RLW_ERROR", "NVLink 5 RLW error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{146, "NVLINK_TLW_ERROR", "NVLink 5 TLW error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{149, "NVLINK_NETIR_ERROR", "NVLink 5 link down", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{150, "NVLINK_MSE_ERROR", "NVLink 5 management firmware error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
	}},
	{Rule: Rule{Class: Fabric, Effect: Withdraws, Clears: ResetSeen | Reboot, Action: "drain and reset the GPU"}, codes: []codeEntry{
		{136, "ALI_TRAINING_FAIL", "NVLink training failed", 565, "RESET_GPU", "INVESTIGATE_LINK_SI"},
		{173, "C2C_FATAL_LINK_FAILURE", "link to the CPU failed", 0, "", ""},
	}},
	{Rule: Rule{
		Class: Fabric, Effect: Degrades, Clears: NoRecoveryAction | LevelClear | Reboot, Level: LevelLinks,
		Action: "find out which software took the link down",
	}, codes: []codeEntry{
		{155, "NVLINK_SW_DEFINED_ERROR", "NVLink taken down by software", 565, "RESET_GPU", "INVESTIGATE_SW_USER"},
	}},
	{Rule: Rule{Class: Fabric, Effect: Degrades, Clears: NoRecoveryAction | ResetSeen | Reboot, Action: "reset the GPU when it is convenient"}, codes: []codeEntry{
		{166, "NVLINK_SECURE_CRYPTO_ERR", "NVLink traffic before encryption was set up", 0, "", ""},
		{170, "NVLINK_SECURE_OTHER", "NVLink fault in confidential-computing mode", 0, "", ""},
	}},
}
