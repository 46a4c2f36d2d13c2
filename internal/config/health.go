package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Health are the settings of health, which both agents have, apart from those in core.Config.
type Health struct {
	StateDir          string // "" = no history on disk, and no control socket
	KernelLog         string // path; "" = it is not read
	KernelLogOptional bool   // a kernel log that can't be read is no warning
	Simulation        bool   // an operator may simulate faults
}

// DefaultHealth is the default of each setting.
func DefaultHealth() Health {
	return Health{StateDir: defaultStateDir, KernelLog: defaultKernelLog, KernelLogOptional: true}
}

const (
	defaultStateDir  = "/var/lib/tandem"
	defaultKernelLog = "/dev/kmsg"
)

// XIDs is the name of the key of health whose value is a mapping.
const XIDs = "xids"

// HealthSpecs are the settings of health in the order of the documentation. A setting has one name in each spelling:
// --recovery-dwell, RECOVERY_DWELL, health.recoveryDwell and recovery_dwell.
func HealthSpecs() []Spec { return healthOptions(new(core.Config), new(Health)) }

func healthOptions(c *core.Config, h *Health) []Spec {
	p := &c.Health
	options := []Spec{
		{HCL: "health_mode", Default: "enforce",
			Usage:   "enforce: unhealthy devices get no new work; observe: report only; off: check only that driver and GPU are present",
			binding: oneOf(&p.Mode, health.ModeEnforce, health.ModeObserve, health.ModeOff)},
		{HCL: XIDs, Usage: "XIDs with another effect than the default: 63=ignore,94=degraded,999=unhealthy", Note: "In the plugin block `{ \"63\" = \"ignore\", \"999\" = \"unhealthy\" }`",
			binding: xidEffects(&p.XIDs)},
		{HCL: "health_period", Default: "10s", Usage: "time between health checks of every GPU", binding: duration(&c.Probe, 0)},
		{HCL: "health_settle", Default: "30s", Usage: "time after an XID until the driver's recovery action is reliable", binding: duration(&p.SettleTime, 0)},
		{HCL: "call_deadline", Default: "1m", Usage: "time after which a driver call that has not returned makes its GPU unhealthy", binding: duration(&p.CallDeadline, 0)},
		{HCL: "recovery", Default: "auto", Usage: "auto: evidence makes a device healthy again; manual: only an operator does",
			binding: choice(&p.ManualRecovery, map[string]bool{"auto": false, "manual": true})},
		{HCL: "recovery_dwell", Default: "1m", Usage: "time for which the evidence must hold; doubles with each relapse, up to an hour", binding: duration(&p.RecoveryDwell, 0)},
		{HCL: "recovery_checks", Default: "3", Usage: "consecutive clean checks that recovery requires beside evidence", binding: count(&p.CleanChecks)},
		{HCL: "recovery_limit", Default: "3", Usage: "recoveries within a day after which only an operator makes a device healthy", binding: count(&p.MaxRecoveries)},
		{HCL: "degraded", Default: "schedulable", Usage: "schedulable: degraded devices get work; unhealthy: they do not",
			binding: choice(&p.DegradedTakesNoWork, map[string]bool{"schedulable": false, "unhealthy": true})},
		{HCL: "application_faults", Default: "degraded",
			Usage: "effect of application XIDs of three workloads within an hour on a GPU: ignore, degraded or unhealthy", binding: choice(&p.ApplicationFaults, effects)},
		{HCL: "kernel_log", Default: "auto", Exists: true, Usage: "second source of XIDs: auto reads " + defaultKernelLog + ", or the same by syslog(2), if allowed; off; or a path", Note: "It has XIDs that NVML does not report",
			binding: h.kernelLog()},
		{HCL: "state_dir", Default: defaultStateDir, Empty: true,
			Usage:   "folder of the health history, the control socket and the devices of the agents of this node; empty: none",
			Note:    "Also the bindings of the policy and the names of groups. A history of another node is set aside",
			binding: orEmpty(&h.StateDir, ownFolder(&h.StateDir, defaultStateDir+", or nothing", inStateDir))},
		{HCL: "overlap", Default: "refuse",
			Usage:   "for a device that another agent of this node offers, too: refuse: only the first of the agents offers it for new work; warn: both do",
			Note:    "Without another agent both are the same",
			binding: oneOf(&c.Overlap, inventory.OverlapWarn, inventory.OverlapRefuse)},
		{HCL: "reservation_check", Default: "off",
			Usage:   "for a device that did not answer its last health check, or whose memory unreserved processes use: warn: log it; refuse: fail the reservation",
			binding: oneOf(&c.ReservationCheck, inventory.CheckOff, inventory.CheckWarn, inventory.CheckRefuse)},
		{HCL: "occupancy", Default: "report",
			Usage:   "owners of devices, and processes that use one without a reservation: off: not read; report: shown; withhold: such a device gets no new work until it is free",
			binding: oneOf(&c.Occupancy, inventory.OccupancyOff, inventory.OccupancyReport, inventory.OccupancyWithhold)},
		{HCL: "simulation", Default: "false", Usage: "true: an operator may simulate faults on the running agent",
			binding: boolean(&h.Simulation)},
	}
	for i := range options {
		s := &options[i]
		words := strings.Split(s.HCL, "_")
		s.Flag = strings.Join(words, "-")
		for j, w := range words[1:] {
			words[j+1] = strings.ToUpper(w[:1]) + w[1:]
		}
		s.Key = "health." + strings.Join(words, "")
	}
	return options
}

// effects are the possible effects of a single XID.
var effects = map[string]xid.Effect{"ignore": xid.None, "degraded": xid.Degrades, "unhealthy": xid.Withdraws}

// xidEffects sets {63: ignore, 999: unhealthy}; nil = none.
func xidEffects(field *map[uint64]xid.Effect) binding {
	t := schema.Type{Kind: schema.Mapping, Values: slices.Sorted(maps.Keys(effects)), Pattern: "^0*[1-9][0-9]*$", Words: "XIDs", Lenient: true}
	return custom(t, func(v Value) error {
		var xids map[uint64]xid.Effect
		for _, p := range v.entries() {
			code, err := strconv.ParseUint(p.key, 10, 32)
			effect, ok := effects[p.value]
			if err != nil || code == 0 || !ok {
				return fmt.Errorf("%q: want an XID and its effect, such as 63=ignore: %s", p, document.Choice(t.Values))
			}
			if _, twice := xids[code]; twice {
				return fmt.Errorf("XID %d is given twice", code)
			}
			if xids == nil {
				xids = map[uint64]xid.Effect{}
			}
			xids[code] = effect
		}
		*field = xids
		return nil
	})
}

// kernelLog sets where the kernel log is read.
func (h *Health) kernelLog() binding {
	t := absolutePath
	t.Values = []string{"auto", "off"}
	return custom(t, func(v Value) error {
		h.KernelLog, h.KernelLogOptional = v.Text, false
		switch v.Text {
		case "auto":
			h.KernelLog, h.KernelLogOptional = defaultKernelLog, true
			return nil
		case "off":
			h.KernelLog = ""
			return nil
		}
		if path(&h.KernelLog, "").set(v) != nil {
			return errors.New("want auto, off or an absolute path such as " + defaultKernelLog)
		}
		return nil
	})
}
