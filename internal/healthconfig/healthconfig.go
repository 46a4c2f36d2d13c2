// Package healthconfig is what an operator can say about health: one table for both agents, so that a key
// means the same to Nomad's plugin block, to a flag, to an environment variable and to a YAML file.
package healthconfig

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
)

// Values are the settings.
type Values struct {
	Health     core.HealthPolicy
	Probe      time.Duration
	StateDir   string // "" = nothing is kept, and no local socket is served
	KernelLog  string // path; "" = not read
	Optional   bool   // the kernel log is read if it can be, and nobody minds if it can't
	Simulation bool   // an operator may rehearse faults
	Overlap    core.OverlapMode
}

// Default is what holds where nothing is said.
func Default() Values {
	c := core.DefaultConfig()
	return Values{
		Health: c.Health, Probe: c.Probe, Overlap: c.Overlap,
		StateDir: "/var/lib/tandem", KernelLog: kernelLog, Optional: true,
	}
}

// Apply puts the settings into a core configuration.
func (v Values) Apply(c *core.Config) { c.Health, c.Probe, c.Overlap = v.Health, v.Probe, v.Overlap }

const kernelLog = "/dev/kmsg"

// Key is one setting.
type Key struct {
	Name    string // "recovery_dwell", as in an HCL block
	Default string
	Usage   string

	// Set takes a value over. Its error says what to write instead, and no more.
	Set func(*Values, string) error
}

// Flag is the key as a command-line flag: "recovery-dwell".
func (k Key) Flag() string { return strings.ReplaceAll(k.Name, "_", "-") }

// Env is the key as an environment variable: "RECOVERY_DWELL".
func (k Key) Env() string { return strings.ToUpper(k.Name) }

// YAML is the key in a configuration file, spelled as the others there: "recoveryDwell".
func (k Key) YAML() string {
	words := strings.Split(k.Name, "_")
	for i, w := range words[1:] {
		words[i+1] = strings.ToUpper(w[:1]) + w[1:]
	}
	return strings.Join(words, "")
}

// Keys are all settings, in the order in which they are documented.
func Keys() []Key {
	return []Key{
		{"health_mode", "enforce", "enforce: unhealthy devices take no work; observe: report only; off: judge only whether driver and GPU are there",
			word(func(v *Values, w core.HealthMode) { v.Health.Mode = w }, map[string]core.HealthMode{
				"enforce": core.ModeEnforce, "observe": core.ModeObserve, "off": core.ModeOff,
			})},
		{XIDs, "", "XIDs with an effect of their own: 63=ignore,94=degraded,999=unhealthy", setXIDs},
		{"health_period", "10s", "time between checks of every GPU", span(func(v *Values) *time.Duration { return &v.Probe })},
		{"health_settle", "30s", "time after an XID until the driver's verdict on it counts",
			span(func(v *Values) *time.Duration { return &v.Health.Settle })},
		{"call_deadline", "1m", "after which a driver call that does not return makes its GPU unhealthy",
			span(func(v *Values) *time.Duration { return &v.Health.Deadline })},
		{"recovery", "auto", "auto: evidence makes a device healthy again; manual: only an operator does",
			word(func(v *Values, w bool) { v.Health.Manual = w }, map[string]bool{"auto": false, "manual": true})},
		{"recovery_dwell", "1m", "time for which the evidence must hold; doubles with each relapse, up to an hour",
			span(func(v *Values) *time.Duration { return &v.Health.Dwell })},
		{"recovery_checks", "3", "clean checks in a row that recovery takes beside evidence",
			count(func(v *Values) *int { return &v.Health.CleanChecks })},
		{"recovery_limit", "3", "recoveries within a day at which an operator has to look",
			count(func(v *Values) *int { return &v.Health.MaxRecoveries })},
		{"degraded", "schedulable", "schedulable: degraded devices take work; unhealthy: they do not",
			word(func(v *Values, w bool) { v.Health.DegradedTakesNoWork = w }, map[string]bool{"schedulable": false, "unhealthy": true})},
		{"application_faults", "degraded", "what application XIDs of three workloads within an hour make of a GPU: ignore, degraded or unhealthy",
			word(func(v *Values, w xid.Effect) { v.Health.Workloads = w }, effects)},
		{"kernel_log", "auto", "second source of XIDs: auto reads " + kernelLog + " if allowed; off; or a path", setKernelLog},
		{"state_dir", "/var/lib/tandem", "folder for the health history, the local socket and what other agents claim; empty: none", setStateDir},
		{"overlap", "warn", "what becomes of a device that another agent on this host offers, too: warn; refuse: only the one that was first gives it to new work",
			word(func(v *Values, w core.OverlapMode) { v.Overlap = w }, map[string]core.OverlapMode{
				"warn": core.OverlapWarn, "refuse": core.OverlapRefuse,
			})},
		{"simulation", "false", "true: let an operator rehearse faults on the running agent",
			word(func(v *Values, w bool) { v.Simulation = w }, map[string]bool{"true": true, "false": false})},
	}
}

// XIDs is the name of the key whose value is a mapping.
const XIDs = "xids"

// effects are what a single XID can be set to.
var effects = map[string]xid.Effect{"ignore": xid.None, "degraded": xid.Degrades, "unhealthy": xid.Withdraws}

// word accepts one of the words.
func word[T any](set func(*Values, T), words map[string]T) func(*Values, string) error {
	return func(v *Values, text string) error {
		w, ok := words[text]
		if !ok {
			return fmt.Errorf("want %s", choice(words))
		}
		set(v, w)
		return nil
	}
}

// choice lists the words: "auto or manual".
func choice[T any](words map[string]T) string {
	names := slices.Sorted(maps.Keys(words))
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

func span(of func(*Values) *time.Duration) func(*Values, string) error {
	return func(v *Values, text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 {
			return fmt.Errorf("want a positive duration such as 30s or 1m")
		}
		*of(v) = d
		return nil
	}
}

func count(of func(*Values) *int) func(*Values, string) error {
	return func(v *Values, text string) error {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return fmt.Errorf("want a number of 1 or more")
		}
		*of(v) = n
		return nil
	}
}

// setXIDs reads "63=ignore, 999=unhealthy".
func setXIDs(v *Values, text string) error {
	xids := map[uint64]xid.Effect{}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		code, word, _ := strings.Cut(item, "=")
		xid, err := strconv.ParseUint(strings.TrimSpace(code), 10, 32)
		effect, ok := effects[strings.TrimSpace(word)]
		if err != nil || xid == 0 || !ok {
			return fmt.Errorf("%q: want an XID and what it does, such as 63=ignore: %s", item, choice(effects))
		}
		if _, twice := xids[xid]; twice {
			return fmt.Errorf("XID %d is given twice", xid)
		}
		xids[xid] = effect
	}
	v.Health.XIDs = xids
	return nil
}

func setKernelLog(v *Values, text string) error {
	v.KernelLog, v.Optional = text, false
	switch {
	case text == "auto":
		v.KernelLog, v.Optional = kernelLog, true
	case text == "off":
		v.KernelLog = ""
	case !filepath.IsAbs(text):
		return fmt.Errorf("want auto, off or an absolute path such as %s", kernelLog)
	}
	return nil
}

func setStateDir(v *Values, text string) error {
	v.StateDir = text
	if text != "" && !filepath.IsAbs(text) {
		return fmt.Errorf("want an absolute path such as /var/lib/tandem, or nothing")
	}
	return nil
}
