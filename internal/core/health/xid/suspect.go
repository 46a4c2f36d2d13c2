package xid

import "time"

// suspect is how a code is treated of which nobody says what it means: in doubt, but in service, until the
// driver's verdict or a while without another says otherwise.
var suspect = Rule{
	Class: Suspect, Effect: Degrades, SettledEffect: Degrades,
	Clears: NoRecoveryAction | ResetSeen | Reboot | Quiet,
	Action: "look at the kernel log; report it to NVIDIA",
}

func unknown(code uint64) Rule {
	r := suspect
	r.Code, r.Meaning = code, "XID without a known meaning"
	if code == 999 {
		r.Meaning = "XID that NVML could not identify"
	}
	return r
}

// legacy gives the columns to a code that the catalogue lists as unused.
func legacy(code uint64, name string) row {
	return row{code, name, "XID that is unused since Ampere", 0, "CONTACT_SUPPORT", ""}
}

// suspects are the XIDs on which NVIDIA's sources contradict each other.
var suspects = []treatment{
	// The catalogue says RESET_GPU; NVIDIA's own device plugin and DRA driver take it for the application's.
	{Rule: Rule{
		Class: Suspect, Effect: Degrades, Clears: NoRecoveryAction | ResetSeen | Reboot,
		RepeatWindow: 10 * time.Minute, RepeatEffect: Withdraws,
		Action: "restart the application; repeated: reset the GPU",
	}, codes: []row{
		{109, "ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR", "context-switch timeout", 570, "RESET_GPU", "CONTACT_SUPPORT"},
	}},
}

// unused are the XIDs that the catalogue lists as unused on Ampere and newer. On Volta and older they have
// the meanings of NVIDIA's archived XID guide.
var unused = []treatment{{Rule: suspect, codes: []row{
	legacy(1, "ROBUST_CHANNEL_FIFO_ERROR_FIFO_METHOD"),
	legacy(2, "ROBUST_CHANNEL_FIFO_ERROR_SW_METHOD"),
	legacy(3, "ROBUST_CHANNEL_FIFO_ERROR_UNK_METHOD"),
	legacy(4, "ROBUST_CHANNEL_FIFO_ERROR_CHANNEL_BUSY"),
	legacy(5, "ROBUST_CHANNEL_FIFO_ERROR_RUNOUT_OVERFLOW"),
	legacy(6, "ROBUST_CHANNEL_FIFO_ERROR_PARSE_ERR"),
	legacy(7, "ROBUST_CHANNEL_FIFO_ERROR_PTE_ERR"),
	legacy(9, "ROBUST_CHANNEL_GR_ERROR_INSTANCE"),
	legacy(10, "ROBUST_CHANNEL_GR_ERROR_SINGLE_STEP"),
	legacy(12, "ROBUST_CHANNEL_GR_ERROR_SW_METHOD"),
	legacy(15, "ROBUST_CHANNEL_SCANLINE_TIMEOUT"),
	legacy(16, "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT"),
	legacy(17, "ROBUST_CHANNEL_PARAMETER_ERROR"),
	legacy(18, "ROBUST_CHANNEL_BUS_MASTER_TIMEOUT_ERROR"),
	legacy(19, "ROBUST_CHANNEL_DISP_MISSED_NOTIFIER"),
	legacy(20, "ROBUST_CHANNEL_MPEG_ERROR_SW_METHOD"),
	legacy(21, "ROBUST_CHANNEL_ME_ERROR_SW_METHOD"),
	legacy(22, "ROBUST_CHANNEL_VP_ERROR_SW_METHOD"),
	legacy(23, "ROBUST_CHANNEL_RC_LOGGING_ENABLED"),
	legacy(24, "ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT"),
	legacy(26, "ROBUST_CHANNEL_FIFO_ERROR_FBISTATE_TIMEOUT"),
	legacy(27, "ROBUST_CHANNEL_VP_ERROR"),
	legacy(28, "ROBUST_CHANNEL_VP2_ERROR"),
	legacy(29, "ROBUST_CHANNEL_BSP_ERROR"),
	legacy(30, "ROBUST_CHANNEL_BAD_ADDR_ACCESS"),
	legacy(33, "ROBUST_CHANNEL_SEC_ERROR"),
	legacy(34, "ROBUST_CHANNEL_MSVLD_ERROR"),
	legacy(35, "ROBUST_CHANNEL_MSPDEC_ERROR"),
	legacy(36, "ROBUST_CHANNEL_MSPPP_ERROR"),
	legacy(42, "ROBUST_CHANNEL_VIC_ERROR"),
	legacy(47, "ROBUST_CHANNEL_NVENC0_ERROR"),
	legacy(49, "SILENT_RUNNING_CONSTANT_LEVEL_SET_BY_REGISTRY"),
	legacy(50, "SILENT_RUNNING_LEVEL_TRANSITION_DUE_TO_RC_ERROR"),
	legacy(51, "SILENT_RUNNING_STRESS_TEST_FAILURE"),
	legacy(52, "SILENT_RUNNING_LEVEL_TRANS_DUE_TO_TEMP_RISE"),
	legacy(53, "SILENT_RUNNING_TEMP_REDUCED_CLOCKING"),
	legacy(55, "SILENT_RUNNING_TEMPERATURE_READ_ERROR"),
	legacy(56, "DISPLAY_CHANNEL_EXCEPTION"),
	legacy(57, "FB_LINK_TRAINING_FAILURE_ERROR"),
	legacy(58, "FB_MEMORY_ERROR"),
	legacy(59, "PMU_ERROR"),
	legacy(61, "PMU_BREAKPOINT"),
	legacy(65, "ROBUST_CHANNEL_NVENC1_ERROR"),
	legacy(73, "ROBUST_CHANNEL_NVENC2_ERROR"),
	legacy(81, "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR"),
	legacy(87, "NVTELEMETRY_DRIVER_REPORT"),
	legacy(90, "LTC_ERROR"),
	legacy(91, "RESERVED_XID"),
	legacy(111, "BUNDLE_ERROR_EVENT"),
	legacy(112, "DISP_SUPERVISOR_ERROR"),
	legacy(113, "DP_LT_FAILURE"),
	legacy(114, "HEAD_RG_UNDERFLOW"),
	legacy(115, "CORE_CHANNEL_REGS"),
	legacy(116, "WINDOW_CHANNEL_REGS"),
	legacy(117, "CURSOR_CHANNEL_REGS"),
	legacy(118, "HEAD_REGS"),
	legacy(122, "SPI_PMU_RPC_READ_FAIL"),
	legacy(123, "SPI_PMU_RPC_WRITE_FAIL"),
	legacy(124, "SPI_PMU_RPC_ERASE_FAIL"),
	legacy(125, "INFOROM_FS_ERROR"),
	legacy(138, "ROBUST_CHANNEL_DLA_ERROR"),
}}}
