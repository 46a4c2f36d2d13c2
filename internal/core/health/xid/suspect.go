package xid

import "time"

// suspect is the rule for codes without a documented meaning: degraded until the driver reports that no recovery
// action is needed, or, without such a report, until the code has not been repeated for a time.
var suspect = Rule{
	Class: Suspect, Effect: Degrades, SettledEffect: Degrades,
	Clears: NoRecoveryAction | ResetSeen | Reboot | Quiet,
	Action: "check the kernel log; report it to NVIDIA",
}

func unknown(code uint64) Rule {
	r := suspect
	r.Code, r.Meaning = code, "XID without a known meaning"
	if code == 999 {
		r.Meaning = "XID that NVML could not identify"
	}
	return r
}

// unusedCode returns the entry of a code that the catalogue lists as unused.
func unusedCode(code uint64, name string) codeEntry {
	return codeEntry{code, name, "XID that is unused since Ampere", 0, "CONTACT_SUPPORT", ""}
}

// suspects are the XIDs on which NVIDIA's sources contradict each other.
var suspects = []ruleGroup{
	// The catalogue recommends RESET_GPU; NVIDIA's device plugin and DRA driver treat it as an application fault.
	{Rule: Rule{
		Class: Suspect, Effect: Degrades, Clears: NoRecoveryAction | ResetSeen | Reboot,
		RepeatWindow: 10 * time.Minute, RepeatEffect: Withdraws,
		Action: "restart the application; repeated: reset the GPU",
	}, codes: []codeEntry{
		{109, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", "context-switch timeout", 570, "RESET_GPU", "CONTACT_SUPPORT"},
	}},
}

// unused are the XIDs that the catalogue lists as unused on Ampere and newer. On Volta and older they have
// the meanings of NVIDIA's archived XID guide.
var unused = []ruleGroup{{Rule: suspect, codes: []codeEntry{
	unusedCode(1, "ROBUST_CHANNEL_FIFO_ERROR_FIFO_METHOD"),
	unusedCode(2, "ROBUST_CHANNEL_FIFO_ERROR_SW_METHOD"),
	unusedCode(3, "ROBUST_CHANNEL_FIFO_ERROR_UNK_METHOD"),
	unusedCode(4, "ROBUST_CHANNEL_FIFO_ERROR_CHANNEL_BUSY"),
	unusedCode(5, "ROBUST_CHANNEL_FIFO_ERROR_RUNOUT_OVERFLOW"),
	unusedCode(6, "ROBUST_CHANNEL_FIFO_ERROR_PARSE_ERR"),
	unusedCode(7, "ROBUST_CHANNEL_FIFO_ERROR_PTE_ERR"),
	unusedCode(9, "ROBUST_CHANNEL_GR_ERROR_INSTANCE"),
	unusedCode(10, "ROBUST_CHANNEL_GR_ERROR_SINGLE_STEP"),
	unusedCode(12, "ROBUST_CHANNEL_GR_ERROR_SW_METHOD"),
	unusedCode(15, "ROBUST_CHANNEL_SCANLINE_TIMEOUT"),
	unusedCode(16, "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT"),
	unusedCode(17, "ROBUST_CHANNEL_PARAMETER_ERROR"),
	unusedCode(18, "ROBUST_CHANNEL_BUS_MASTER_TIMEOUT_ERROR"),
	unusedCode(19, "ROBUST_CHANNEL_DISP_MISSED_NOTIFIER"),
	unusedCode(20, "ROBUST_CHANNEL_MPEG_ERROR_SW_METHOD"),
	unusedCode(21, "ROBUST_CHANNEL_ME_ERROR_SW_METHOD"),
	unusedCode(22, "ROBUST_CHANNEL_VP_ERROR_SW_METHOD"),
	unusedCode(23, "ROBUST_CHANNEL_RC_LOGGING_ENABLED"),
	unusedCode(24, "ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT"),
	unusedCode(26, "ROBUST_CHANNEL_FIFO_ERROR_FBISTATE_TIMEOUT"),
	unusedCode(27, "ROBUST_CHANNEL_VP_ERROR"),
	unusedCode(28, "ROBUST_CHANNEL_VP2_ERROR"),
	unusedCode(29, "ROBUST_CHANNEL_BSP_ERROR"),
	unusedCode(30, "ROBUST_CHANNEL_BAD_ADDR_ACCESS"),
	unusedCode(33, "ROBUST_CHANNEL_SEC_ERROR"),
	unusedCode(34, "ROBUST_CHANNEL_MSVLD_ERROR"),
	unusedCode(35, "ROBUST_CHANNEL_MSPDEC_ERROR"),
	unusedCode(36, "ROBUST_CHANNEL_MSPPP_ERROR"),
	unusedCode(42, "ROBUST_CHANNEL_VIC_ERROR"),
	unusedCode(47, "ROBUST_CHANNEL_NVENC0_ERROR"),
	unusedCode(49, "SILENT_RUNNING_CONSTANT_LEVEL_SET_BY_REGISTRY"),
	unusedCode(50, "SILENT_RUNNING_LEVEL_TRANSITION_DUE_TO_RC_ERROR"),
	unusedCode(51, "SILENT_RUNNING_STRESS_TEST_FAILURE"),
	unusedCode(52, "SILENT_RUNNING_LEVEL_TRANS_DUE_TO_TEMP_RISE"),
	unusedCode(53, "SILENT_RUNNING_TEMP_REDUCED_CLOCKING"),
	unusedCode(55, "SILENT_RUNNING_TEMPERATURE_READ_ERROR"),
	unusedCode(56, "DISPLAY_CHANNEL_EXCEPTION"),
	unusedCode(57, "FB_LINK_TRAINING_FAILURE_ERROR"),
	unusedCode(58, "FB_MEMORY_ERROR"),
	unusedCode(59, "PMU_ERROR"),
	unusedCode(61, "PMU_BREAKPOINT"),
	unusedCode(65, "ROBUST_CHANNEL_NVENC1_ERROR"),
	unusedCode(73, "ROBUST_CHANNEL_NVENC2_ERROR"),
	unusedCode(81, "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR"),
	unusedCode(87, "NVTELEMETRY_DRIVER_REPORT"),
	unusedCode(90, "LTC_ERROR"),
	unusedCode(91, "RESERVED_XID"),
	unusedCode(111, "BUNDLE_ERROR_EVENT"),
	unusedCode(112, "DISP_SUPERVISOR_ERROR"),
	unusedCode(113, "DP_LT_FAILURE"),
	unusedCode(114, "HEAD_RG_UNDERFLOW"),
	unusedCode(115, "CORE_CHANNEL_REGS"),
	unusedCode(116, "WINDOW_CHANNEL_REGS"),
	unusedCode(117, "CURSOR_CHANNEL_REGS"),
	unusedCode(118, "HEAD_REGS"),
	unusedCode(122, "SPI_PMU_RPC_READ_FAIL"),
	unusedCode(123, "SPI_PMU_RPC_WRITE_FAIL"),
	unusedCode(124, "SPI_PMU_RPC_ERASE_FAIL"),
	unusedCode(125, "INFOROM_FS_ERROR"),
	unusedCode(138, "ROBUST_CHANNEL_DLA_ERROR"),
}}}
