package health

import (
	"cmp"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const (
	operations = "../../../docs/operations.md"
	causesHead = "<!-- causes: generated from internal/core/health by `go test ./internal/core/health -update`; do not edit -->\n"
	causesEnd  = "<!-- end of causes -->\n"
)

// advice is what an operator does beside, or in place of, the action that the text of the health names. Causes without one are a
// mistake of this table.
var advice = map[Reason]string{
	ReasonXID:            "[faults.md](faults.md) has the action for each XID. The causes are `XID_79`, `XID_95` and so on; those of other NVML events `EVENT_...`",
	ReasonEvent:          "[faults.md](faults.md#nvml-events)",
	ReasonRecoveryAction: "do what the text names, after a drain: `GPU reset`, `drain and reset`, `node reboot`, `drain P2P`, `recover IMEX domain`, `bus reset` (or a reboot, if the bus can't be reset), `system reboot`. The causes are `RECOVERY_ACTION_...`",
	ReasonLost:           "the GPU fell off the bus or was removed. Look for XID 79 and PCIe errors in the kernel log; after a reboot without the GPU, replace it. A GPU that was removed on purpose is forgotten after a day",
	ReasonProbe:          "`inspect` has the call and its error",
	ReasonUnresponsive:   "`debug` lists the call and since when it runs. Other GPUs are not affected",
	ReasonUnchecked:      "wait for the next checks; if it stays, see `inspect` for the call that fails",
	ReasonDriver:         "`inspect` has the reason: library not found, kernel module not loaded, versions that differ. Work that runs is not affected. Load or repair the driver; the agent follows within a second",
	ReasonMaintenance:    "`resume`, or wait for the end that `--for` named",
	ReasonRemapFailed:    "drain the GPU. No reset repairs it; after a replacement the condition goes with the GPU",
	ReasonUnrepairable:   "as for ROW_REMAP_FAILED",
	ReasonSRAM:           "as for ROW_REMAP_FAILED",
	ReasonRemapPending:   "no hurry: the GPU works with a spare row after the reset",
	ReasonRetirement:     "no hurry: the page is not used after the reset",
	ReasonRepair:         "no hurry: the repair is made by the reset",
	ReasonInfoROM:        "the GPU works, but its records of errors may be lost",
	ReasonECC:            "compare the workloads' results; the count is in `inspect`",
	ReasonOperational:    "the text has the event, and `inspect` lists all; [operational events](faults.md#sources)",
	ReasonFabricWait:     "`systemctl status nvidia-fabricmanager`; the version must be the driver's",
	ReasonFabric:         "its log is `/var/log/fabricmanager.log`; a GPU without the fabric can't be used by CUDA on NVSwitch systems",
	ReasonFabricLimits:   "jobs over several GPUs are slower",
	ReasonNVLinksDown:    "jobs over several GPUs are slower; `nvidia-smi nvlink -s` shows which links",
	ReasonThermal:        "fans, air flow, dust, ambient temperature; jobs are slower meanwhile",
	ReasonPowerBrake:     "power supplies and the rack's limit; jobs are slower meanwhile",
	ReasonReplays:        "seat the card again; jobs that copy are slower meanwhile",
	ReasonPCIeWidth:      "seat the card again; jobs that copy are slower meanwhile",
	ReasonWorkloads:      "three workloads had application faults within an hour: either they share a mistake, or the GPU is at fault. A workload is a reservation: a container that is restarted is the same one, a pod or allocation that replaces another one is not. On a GPU that is shared, workloads can't be told apart, and no fault counts. The setting `application_faults` decides the effect",
	ReasonNeedsService:   "it came back too often ([`recovery_limit`](configuration.md)). `clear --gpu ...` after the diagnostics",
	ReasonProofFailed:    "the text has what the proof reported; `clear --gpu ...` if the proof was at fault",
	ReasonWithdrawn:      "nothing: the unit disappears in two seconds",
	ReasonNoMPS:          "[MPS](sharing.md#mps) has what runs it, and its log the reason, also if it answers and waits for the end of its clients",
	ReasonOverlap:        "with `overlap = \"refuse\"`, the default: [two agents on one node](policy.md#two-agents-on-one-node)",
	ReasonHeld:           "the text names the pod, or the memory that running work has",
	ReasonNoIMEX:         "with `--imex-required` only",
	ReasonNoCDI:          "[what to check](cdi.md)",
	ReasonMoving:         "nothing: running work goes on, and the GPU changes its API when it has ended; `migrate plan` shows what is missing",
	ReasonProving:        "nothing: it is no fault, and ends with the proof; work that was placed on the GPU is refused, and placed again",
	ReasonResetting:      "nothing: it is no fault, and ends with the reset; the text names the GPU that is reset if it is another one; work that was placed on the GPU is refused, and placed again",
	ReasonNoLimit:        "the policy has `limit: required`, and the text what is missing: a driver from 615, control groups of version 2, a hook program from 1.20.1 ([limits of memory](sharing.md#memory-limits))",
	ReasonNoController:   "the policy has `limit: required`, and the text names the control group in which the kernel's controller is to be enabled",
	ReasonOccupied:       "with `occupancy = withhold` only; `inspect` lists the processes",
	ReasonFaultUnknown: "a health history could not be read (`HISTORY_NOT_READ`). The recovery action counts with a driver from " +
		"575 on, whose branch covers the codes. A kernel log that reaches back to the load of the driver shows the faults, too; so does " +
		"a proof that passes. `clear --gpu ...` when you have checked the GPU",
}

// TestDocument compares the table of causes in docs/operations.md with the meanings. -update writes it.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile(operations)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), causesHead)
	_, after, ends := strings.Cut(rest, causesEnd)
	if !ok || !ends {
		t.Fatalf("%s has no section of causes", operations)
	}
	goldenfile.Compare(t, operations, before+causesHead+causes(t)+causesEnd+after)
}

func causes(t *testing.T) string {
	var b strings.Builder
	b.WriteString("\n| cause | meaning | state | cleared by | what to do |\n|---|---|---|---|---|\n")
	for i, m := range meanings[1:] {
		r := Reason(i + 1)
		if advice[r] == "" {
			t.Errorf("%s has no advice", r)
		}
		name, state := "`"+m.name+"`", m.state.String()
		if r == ReasonXID || r == ReasonEvent { // each code has its own
			name, state = "`"+m.name+"_...`", "by code"
		}
		if r == ReasonRecoveryAction {
			name = "`RECOVERY_ACTION_...`"
		}
		if m.checks > 1 {
			state += fmt.Sprintf(", after %d checks", m.checks)
		}
		action := advice[r]
		if m.action != "" {
			action = m.action + "; " + action
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", name, cmp.Or(m.text, "reported by the driver"), state, clearedBy(r, m), action)
	}
	return b.String() + "\n"
}

// clearedBy is the evidence that clears a condition.
func clearedBy(r Reason, m meaning) string {
	switch {
	case r == ReasonXID, r == ReasonEvent:
		return "by code"
	case m.clearsText != "":
		return m.clearsText
	case r == ReasonWithdrawn:
		return "its removal"
	}
	return m.clears.String()
}
