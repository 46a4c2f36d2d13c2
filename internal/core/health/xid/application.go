package xid

import (
	"slices"
	"time"
)

// applications are the XIDs of an error in a program. A single one never changes the health: otherwise one program
// that fails repeatedly would take the GPU from all others.
var applications = []ruleGroup{
	{Rule: Rule{Class: Application, Action: "restart the application"}, codes: slices.Concat(
		[]codeEntry{
			{8, "ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT", "channel idle timeout", 0, "RESTART_APP", "CONTACT_SUPPORT"},
			{60, "ROBUST_CHANNEL_SEC2_ERROR", "SEC2 engine error", 0, "RESTART_APP", "INVESTIGATE_SW"},
			{86, "ROBUST_CHANNEL_OFA0_ERROR", "optical-flow engine 0 error", 0, "RESTART_APP", "CONTACT_SUPPORT"},
			{139, "ROBUST_CHANNEL_OFA1_ERROR", "optical-flow engine 1 error", 0, "RESTART_APP", "CONTACT_SUPPORT"},
			{142, "ROBUST_CHANNEL_NVENC3_ERROR", "video encoder 3 error", 0, "CONTACT_SUPPORT", ""},
		},
		engineCodes("ROBUST_CHANNEL_CE%d_ERROR", "copy engine %d error",
			39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135),
		engineCodes("ROBUST_CHANNEL_NVDEC%d_ERROR", "video decoder %d error",
			68, 83, 84, 88, 89, 96, 97, 98),
		engineCodes("ROBUST_CHANNEL_NVJPG%d_ERROR", "JPEG decoder %d error",
			82, 99, 100, 101, 102, 103, 104, 105),
	)},
	{Rule: Rule{Class: Application, Action: "debug the application"}, codes: []codeEntry{
		{11, "ROBUST_CHANNEL_GR_ERROR_MISSING_HW", "bad command stream", 0, "RESTART_APP", "CHECK_APP/CUDA"},
		{13, "ROBUST_CHANNEL_GR_EXCEPTION", "exception in a kernel or shader", 0, "RESTART_APP", "WORKFLOW_XID_13"},
		{25, "ROBUST_CHANNEL_GR_ILLEGAL_NOTIFY", "bad command stream", 0, "RESTART_APP", "CHECK_APP/CUDA"},
		{31, "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT", "memory page fault", 0, "RESTART_APP", "WORKFLOW_XID_31"},
		{37, "ROBUST_CHANNEL_FECS_ERR_UNIMP_FIRMWARE_METHOD", "method that the firmware does not know", 0, "IGNORE", "CHECK_APP/CUDA"},
		{43, "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR", "application killed after a fault of its own", 0, "IGNORE", "CONTACT_SUPPORT"},
		{69, "ROBUST_CHANNEL_GR_CLASS_ERROR", "bad graphics class or method", 0, "RESTART_APP", "CHECK_APP/CUDA"},
		{108, "NVLINK_REMOTE_TRANSLATION_ERROR", "illegal access to a peer over NVLink", 0, "IGNORE", "XID_137_FLOW"},
		{137, "NVLINK_PRIV_ERR", "illegal access to a peer over NVLink", 0, "IGNORE", "XID_137_FLOW"},
		{141, "ROBUST_CHANNEL_FAST_PATH_ERROR", "CUDA fast-path error", 0, "IGNORE", "CONTACT_SUPPORT"},
	}},

	// Consequences: the driver cleans up after an abort, a kill, a reset or another XID.
	{Rule: Rule{Class: Application}, codes: []codeEntry{
		{45, "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL", "channels of an application torn down", 0, "WORKFLOW_XID_45", "Solo: RESTART_FM; not solo: IGNORE (follow other XID)"},
		{174, "ROBUST_CHANNEL_RESETCHANNEL_KILL_PROCESS_SILENT", "application killed on a channel reset", 0, "", ""},
	}},

	// NVIDIA on XID 32: "primarily quality issues on PCI", not the application. Only PCIe replays in the same
	// minute confirm this.
	{Rule: Rule{Class: Application, Clears: Quiet | Reboot, Action: "restart the application, watch PCIe replays"}, codes: []codeEntry{
		{32, "ROBUST_CHANNEL_PBDMA_ERROR", "corrupt command stream", 0, "RESTART_APP", "CHECK_APP/CUDA"},
	}},
	{Rule: Rule{
		Class: Application, Clears: Quiet | Reboot, RepeatWindow: time.Hour, RepeatEffect: Degrades,
		Action: "restart the application; repeated: check PCIe",
	}, codes: []codeEntry{
		{80, "PBDMA_PUSHBUFFER_CRC_MISMATCH", "corrupt data sent to the GPU", 0, "RESTART_APP", "CHECK_APP/CUDA"},
	}},
}

// notes are XIDs that require no immediate action.
var notes = []ruleGroup{
	{Rule: Rule{Class: Info}, codes: []codeEntry{
		{14, "ROBUST_CHANNEL_FAKE_ERROR", "injected error", 0, "IGNORE", "CONTACT_SUPPORT"},
		{38, "ROBUST_CHANNEL_FECS_ERR_WATCHDOG_TIMEOUT", "context-switch firmware watchdog", 0, "IGNORE", "CONTACT_SUPPORT"},
		{44, "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW", "fault during a context switch", 0, "IGNORE", "CONTACT_SUPPORT"},
		{66, "ROBUST_CHANNEL_FECS_ERR_REG_ACCESS_VIOLATION", "illegal register access by the driver", 0, "IGNORE", "INVESTIGATE_SW"},
		{67, "ROBUST_CHANNEL_FECS_ERR_VERIF_VIOLATION", "illegal register access by the driver", 0, "IGNORE", "CONTACT_SUPPORT"},
		{93, "INFOROM_ERASE_LIMIT_EXCEEDED", "InfoROM wear limit exceeded", 0, "IGNORE", "CONTACT_SUPPORT"},
		{106, "SMBPBI_TEST_MESSAGE", "test message", 0, "IGNORE", "IGNORE"},
		{107, "SMBPBI_TEST_MESSAGE_SILENT", "test message", 0, "IGNORE", "IGNORE"},
		{147, "NVLINK_TREX_ERROR", "NVLink 5 TREX error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{148, "NVLINK_NVLPW_CTRL_ERROR", "NVLink 5 NVLPW error", 565, "WORKFLOW_NVLINK5_ERR", "WORKFLOW_NVLINK5_ERR"},
		{152, "ROBUST_CHANNEL_DLA_SMMU_ERROR", "deep-learning accelerator memory fault", 0, "IGNORE", "CONTACT_SUPPORT"},
		{153, "ROBUST_CHANNEL_DLA_TIMEOUT", "deep-learning accelerator timeout", 0, "IGNORE", "CONTACT_SUPPORT"},
		{162, "PSHC_REENGAGED", "power smoothing engaged again", 0, "", ""},
		{163, "PSHC_DISENGAGED", "power smoothing disengaged", 0, "", ""},
	}},
	{Rule: Rule{Class: Info, Action: "align the vGPU versions of host and guest"}, codes: []codeEntry{
		{78, "VGPU_START_ERROR", "vGPU can't start", 0, "UPDATE_SWFW", "UPDATE_SWFW"},
	}},
	{Rule: Rule{Class: Info, Effect: Degrades, Clears: ResetSeen | Reboot | Quiet, Action: "reset the GPU when it is convenient"}, codes: []codeEntry{
		{121, "C2C_ERROR", "corrected errors on the link to the CPU", 0, "IGNORE", "CONTACT_SUPPORT"},
	}},
	{Rule: Rule{Class: Info, Effect: Degrades, Action: "plan to replace the GPU"}, codes: []codeEntry{
		{164, "PSHC_LOW_LIFETIME", "power-smoothing hardware near its end", 0, "", ""},
		{165, "PSHC_ZERO_LIFETIME", "power-smoothing hardware worn out", 0, "", ""},
	}},
	{Rule: Rule{Class: Trigger}, codes: []codeEntry{
		{154, "GPU_RECOVERY_ACTION_CHANGED", "GPU recovery action changed", 0, "XID_154", "N/A (informational, regarding another XID)"},
	}},
}
