package resourceslice_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// taintsOf returns the taints of the first GPU.
func taintsOf(in resourceslice.Input) []kubeapi.DeviceTaint {
	return resourceslice.Devices(in)[0].Taints
}

// build returns the inventory of two GPUs with a ledger.
func build(l health.Ledger, change ...func(*core.Config)) *inventory.Allocatable {
	return core.Build(coretest.GPUs(2), l, config(change...)).WithoutHost()
}

// Each condition is a taint with its own key, effect and time, the worst first; the other GPU has none.
func TestEachConditionIsATaint(t *testing.T) {
	pending := health.Observation{
		At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.Checked,
		Sample: health.Sample{RecoveryAction: health.RecoveryReset, RemapPending: health.Yes},
	}
	l := ledger(xidOf(0, 94), xidOf(0, 95), pending, pending, xidOf(0, 79))
	for about, tc := range map[string]struct {
		in   resourceslice.Input
		mode health.Mode
		want string
	}{
		"by default": {resourceslice.Input{}, health.ModeEnforce, `
  gpu.nvidia.com/xid=79:NoSchedule since 2026-11-20T10:31:04Z
  gpu.nvidia.com/xid=95:NoSchedule since 2026-11-20T10:31:01Z
  gpu.nvidia.com/recovery-action=gpu-reset:NoSchedule since 2026-11-20T10:31:02Z
  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z
  gpu.nvidia.com/row-remap-pending=:None since 2026-11-20T10:31:02Z
`},
		"with eviction": {resourceslice.Input{Evict: true}, health.ModeEnforce, `
  gpu.nvidia.com/xid=79:NoExecute since 2026-11-20T10:31:04Z
  gpu.nvidia.com/xid=95:NoExecute since 2026-11-20T10:31:01Z
  gpu.nvidia.com/recovery-action=gpu-reset:NoExecute since 2026-11-20T10:31:02Z
  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z
  gpu.nvidia.com/row-remap-pending=:None since 2026-11-20T10:31:02Z
`},
		"observed only": {resourceslice.Input{Evict: true}, health.ModeObserve, `
  gpu.nvidia.com/xid=79:None since 2026-11-20T10:31:04Z
  gpu.nvidia.com/xid=95:None since 2026-11-20T10:31:01Z
  gpu.nvidia.com/recovery-action=gpu-reset:None since 2026-11-20T10:31:02Z
  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z
  gpu.nvidia.com/row-remap-pending=:None since 2026-11-20T10:31:02Z
`},
		"all devices withdrawn": {resourceslice.Input{Cordoned: "claims of another driver: gpu-0"}, health.ModeOff, `
  gpu.nvidia.com/withdrawn=claims-of-another-driver--gpu-0:NoSchedule since -
`},
	} {
		tc.in.Allocatable = build(l, func(c *core.Config) { c.Health.Mode = tc.mode })
		if diff := gocmp.Diff(strings.TrimPrefix(tc.want, "\n"), formatTaints(taintsOf(tc.in))); diff != "" {
			t.Error(about, diff)
		}
		if other := resourceslice.Devices(tc.in)[1].Taints; len(other) > 0 && tc.in.Cordoned == "" {
			t.Errorf("%s: the healthy GPU has %v", about, other)
		}
	}
}

// An unknown health keeps new work away and never evicts, nor do calls of the agent that fail or do not return, or a GPU that the agent is not shown:
// work may go on. A lost GPU has the key of NVIDIA's driver.
func TestStates(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(0))
	for about, tc := range map[string]struct {
		o    health.Observation
		want string
	}{
		"lost":         {health.Observation{At: at, Kind: health.Lost, Detail: "nvmlDeviceGetMemoryInfo: GPU is lost"}, "gpu.nvidia.com/gpu-lost=:NoExecute"},
		"not listed":   {health.Observation{At: at, Kind: health.Lost, Detail: health.NotListed}, "gpu.nvidia.com/gpu-lost=:NoSchedule"}, // perhaps only not shown
		"errors":       {health.Observation{At: at, Kind: health.ProbeFailed, Detail: "nvmlDeviceGetECCMode: Unknown Error"}, "gpu.nvidia.com/probe-failed=:NoSchedule"},
		"no driver":    {health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverFailed)}, "gpu.nvidia.com/nvml-unavailable=:NoSchedule"},
		"does not ask": {health.Observation{At: at, Kind: health.Unresponsive}, "gpu.nvidia.com/not-answering=:NoSchedule"},
	} {
		got := formatTaints(taintsOf(resourceslice.Input{Allocatable: build(ledger(tc.o, tc.o, tc.o)), Evict: true})) // three failed checks in a row count
		if !strings.Contains(got, tc.want+" since 2026-11-20T10:31:00Z\n") {
			t.Errorf("%s: %swant %s", about, got, tc.want)
		}
	}
	if got := formatTaints(taintsOf(resourceslice.Input{Evict: true, Allocatable: build(health.Ledger{}).WithHost(inventory.Host{
		Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}},
	}, inventory.OverlapRefuse)})); got != "  gpu.nvidia.com/contested=nomad-gpu:NoSchedule since -\n" {
		t.Errorf("another agent's GPU: %s", got)
	}
}

// An agent that is shown two of eight GPUs after a restart keeps new work away from the others, and evicts none: nothing shows that they are broken.
func TestAgentIsShownFewerGPUs(t *testing.T) {
	c := config()
	s := core.NewState(c).Read(c, start, coretest.GPUs(8))
	in := resourceslice.Input{Allocatable: s.Allocatable, BootID: boot, Evict: true}
	for i, d := range resourceslice.Devices(in) {
		in.Prepared = append(in.Prepared, claim(fmt.Sprint(i), in.Allocatable, d))
	}
	for i := range 10 {
		s = s.Read(c, start.Add(time.Duration(i+1)*time.Minute), coretest.GPUs(2))
		in.Allocatable = s.Allocatable
		all := resourceslice.Devices(in)
		if len(all) != 8 {
			t.Fatalf("%d devices", len(all))
		}
		for i, d := range all[2:] {
			if !d.Held || len(d.Taints) == 0 || slices.ContainsFunc(d.Taints, func(t kubeapi.DeviceTaint) bool { return t.Effect != kubeapi.NoSchedule }) {
				t.Errorf("GPU %d: %v", i+2, d.Taints)
			}
		}
	}
}

// A fault is a taint and a message, and its recovery removes both.
func TestRecovery(t *testing.T) {
	at, now := gpu.WholeGPU(coretest.GPU(0)), start
	checked := func(l health.Ledger, pending health.Tristate) health.Ledger {
		now = now.Add(10 * time.Second)
		return l.Apply(health.DefaultPolicy(), now, health.Observation{At: at, Kind: health.Checked, Sample: health.Sample{RecoveryAction: health.RecoveryNone, RemapPending: pending}})
	}
	of := func(l health.Ledger) (taints, message string) {
		in := resourceslice.Input{Allocatable: build(l)}
		return formatTaints(taintsOf(in)), resourceslice.Messages(in)[0].Message
	}
	l := checked(health.Ledger{}, health.No)
	l = checked(checked(l, health.Yes), health.Yes)
	taints, message := of(l)
	if taints != "  gpu.nvidia.com/row-remap-pending=:None since 2026-11-20T10:31:20Z\n" || !strings.HasPrefix(message, "degraded: row remap pending since 2026-11-20T10:31Z") {
		t.Errorf("%s%s", taints, message)
	}
	before := taints
	for range 3 { // evidence that has not held for the dwell time
		l = checked(l, health.No)
	}
	if taints, _ := of(l); taints != before {
		t.Errorf("during the recovery: %s", taints)
	}
	for range 10 {
		l = checked(l, health.No)
	}
	if taints, message := of(l); taints != "" || message != "" {
		t.Errorf("after the recovery: %s%s", taints, message)
	}
}

// Conditions stay visible when the node causes a worse one.
func TestHostDoesNotHideConditions(t *testing.T) {
	inv := build(ledger(xidOf(0, 94))).WithHost(inventory.Host{
		Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: gpu.WholeGPU(coretest.GPU(0)), Earlier: true}},
	}, inventory.OverlapRefuse)
	want := "  gpu.nvidia.com/contested=nomad-gpu:NoSchedule since -\n  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z\n"
	if got := formatTaints(taintsOf(resourceslice.Input{Allocatable: inv})); got != want {
		t.Error(got)
	}
}

// A device has at most 16 taints: the worst conditions. The condition of a GPU and the same one of its instance are one taint.
func TestTooManyConditions(t *testing.T) {
	var obs []health.Observation
	for code := range uint64(20) {
		obs = append(obs, xidOf(0, 1000+code)) // unknown codes: degraded
	}
	obs = append(obs, xidOf(0, 95))
	taints := taintsOf(resourceslice.Input{Allocatable: build(ledger(obs...))})
	if len(taints) != resourceslice.MaxTaints || taints[0].Value != "95" || taints[1].Value != "1000" || taints[15].Value != "1014" {
		t.Errorf("%d taints:\n%s", len(taints), formatTaints(taints))
	}

	instance := xidOf(0, 94)
	instance.At.GI, instance.At.CI = 1, 0
	s := coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb")
	inv := core.Build(s, ledger(xidOf(0, 94), instance), config()).WithoutHost()
	if got := formatTaints(taintsOf(resourceslice.Input{Allocatable: inv})); got != "  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z\n" {
		t.Errorf("an XID of the GPU and of its instance: %s", got)
	}
}

var (
	keyForm   = regexp.MustCompile(`^gpu\.nvidia\.com/[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	valueForm = regexp.MustCompile(`^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$`)
)

// Every code in the table of faults has a taint that the API server accepts: its key is that of a label, its value a label's value.
func TestEveryFaultIsALabelValue(t *testing.T) {
	published := map[string]bool{}
	check := func(o health.Observation) {
		o.At = gpu.WholeGPU(coretest.GPU(0))
		for _, taint := range taintsOf(resourceslice.Input{Allocatable: build(ledger(o))}) {
			published[taint.Key+"="+taint.Value] = true
			if !keyForm.MatchString(taint.Key) || !valueForm.MatchString(taint.Value) || len(taint.Value) > 63 {
				t.Errorf("%s %d: %+v", o.At, o.Code, taint)
			}
		}
	}
	for r := range xid.XIDs() {
		if check(health.Observation{Kind: health.XID, Code: r.Code}); r.Effect > xid.None && !published[fmt.Sprintf("gpu.nvidia.com/xid=%d", r.Code)] {
			t.Errorf("XID %d has no taint", r.Code)
		}
	}
	for r := range xid.Events() {
		if check(health.Observation{Kind: health.Event, Code: r.Code}); r.Effect > xid.None && !published[fmt.Sprintf("gpu.nvidia.com/event=0x%x", r.Code)] {
			t.Errorf("event %#x has no taint", r.Code)
		}
	}
	check(health.Observation{Kind: health.XID, Code: ^uint64(0)})
	for action := range health.RecoveryOther + 1 {
		check(health.Observation{Kind: health.Checked, Sample: health.Sample{RecoveryAction: action}})
	}
	for _, value := range []string{"gpu-reset", "node-reboot", "drain-and-reset", "bus-reset", "system-reboot", "unknown-action"} {
		if !published["gpu.nvidia.com/recovery-action="+value] {
			t.Errorf("no taint for the recovery action %s", value)
		}
	}
	for _, text := range []string{"", "...", "a b:c", "é", strings.Repeat("x.", 60), "-claims of another driver-"} {
		taint := taintsOf(resourceslice.Input{Allocatable: build(health.Ledger{}), Cordoned: "x" + text})[0]
		if !valueForm.MatchString(taint.Value) || len(taint.Value) > 63 {
			t.Errorf("%q is the value %q", text, taint.Value)
		}
	}
}

// A condition without a recorded beginning keeps the time at which its taint was published first, over restarts of the agent and wiped
// slices, until it is gone.
func TestStamp(t *testing.T) {
	now := start
	in := resourceslice.Input{Allocatable: build(ledger(xidOf(0, 94))), Cordoned: "test"}
	first := resourceslice.Stamp(resourceslice.Devices(in), nil, now)
	want := "  gpu.nvidia.com/withdrawn=test:NoSchedule since 2026-11-20T10:31:00Z\n  gpu.nvidia.com/xid=94:None since 2026-11-20T10:31:00Z\n"
	if got := formatTaints(first[0].Taints); got != want {
		t.Error(got)
	}
	now = now.Add(time.Hour)
	if diff := gocmp.Diff(first, resourceslice.Stamp(resourceslice.Devices(in), first, now)); diff != "" {
		t.Error("stamped again:", diff)
	}
	in.Cordoned = ""
	healthy := resourceslice.Stamp(resourceslice.Devices(in), first, now)
	in.Cordoned = "test"
	again := resourceslice.Stamp(resourceslice.Devices(in), healthy, now)
	if got := again[1].Taints[0].TimeAdded; !got.Equal(now.Truncate(time.Second)) {
		t.Errorf("the taint of a new condition is of %v", got)
	}
	if devices := resourceslice.Devices(in); !devices[0].Taints[0].TimeAdded.IsZero() {
		t.Error("Stamp has changed its argument")
	}
}

// The health stream has the words of Nomad's HealthDescription after the cause. What concerns new work only is not the health of work that runs.
func TestMessages(t *testing.T) {
	at := gpu.WholeGPU(coretest.GPU(0))
	older := inventory.Host{Peers: []inventory.PeerDevice{{Agent: "nomad-gpu", At: at, Earlier: true}}}
	refuse := func(inv *inventory.Allocatable) *inventory.Allocatable {
		return inv.WithHost(older, inventory.OverlapRefuse)
	}
	observe := func(c *core.Config) { c.Health.Mode = health.ModeObserve }
	for about, tc := range map[string]struct {
		inv    *inventory.Allocatable
		status resourceslice.HealthStatus
		begins string
	}{
		"healthy":                {build(health.Ledger{}), resourceslice.StatusHealthy, ""},
		"degraded":               {build(ledger(xidOf(0, 94))), resourceslice.StatusHealthy, "degraded: XID 94"},
		"unhealthy":              {build(ledger(xidOf(0, 95))), resourceslice.StatusUnhealthy, "unhealthy: XID 95"},
		"unhealthy, observed":    {build(ledger(xidOf(0, 95)), observe), resourceslice.StatusHealthy, "observed, not enforced: unhealthy: XID 95"},
		"lost":                   {build(ledger(health.Observation{At: at, Kind: health.Lost})), resourceslice.StatusUnhealthy, "lost: GPU is lost"},
		"no driver":              {build(ledger(health.Observation{At: gpu.Node, Kind: health.DriverUnavailable})), resourceslice.StatusUnknown, "unknown: driver is not usable"},
		"another agent's":        {refuse(build(health.Ledger{})), resourceslice.StatusHealthy, ""},
		"another agent's, sick":  {refuse(build(ledger(xidOf(0, 95)))), resourceslice.StatusUnhealthy, "unhealthy: XID 95"},
		"another agent's, so so": {refuse(build(ledger(xidOf(0, 94)))), resourceslice.StatusHealthy, "degraded: XID 94"},
	} {
		all := resourceslice.Messages(resourceslice.Input{Allocatable: tc.inv, Cordoned: "test"})
		m := all[0]
		if m.Device != name(0) || m.Status != tc.status || !strings.HasPrefix(m.Message, tc.begins) || (m.Message == "") != (tc.begins == "") || len(m.Message) > 1024 {
			t.Errorf("%s: %+v", about, m)
		}
		for u := range tc.inv.Devices() {
			if text := u.Health.String(); u.Device.ID == coretest.GPU(0) && m.Message != "" && !strings.Contains(text, "another agent") && m.Message != text {
				t.Errorf("%s: %q, and Nomad has %q", about, m.Message, text)
			}
		}
		if len(all) != 2 {
			t.Errorf("%s: %+v", about, all)
		}
	}
	gone := resourceslice.Input{Allocatable: build(health.Ledger{}), BootID: boot}
	gone.Prepared = []prepared.Claim{claim("c", gone.Allocatable, resourceslice.Devices(gone)[1])}
	gone.Allocatable = core.Build(coretest.GPUs(1), health.Ledger{}, config()).WithoutHost()
	if m := resourceslice.Messages(gone)[1]; m.Device != name(1) || m.Status != resourceslice.StatusUnknown || m.Message == "" {
		t.Errorf("a GPU that is gone: %+v", m)
	}
}

const (
	document    = "../../../../docs/dra.md"
	tableBegins = "<!-- taints: generated from internal/kubeadapter/dra/resourceslice by go test -update; do not edit -->\n"
	tableEnds   = "<!-- end of taints -->\n"
)

// The keys of taints, one for each cause, as docs/dra.md has them. A key never changes, because claims tolerate it.
func TestTaintKeys(t *testing.T) {
	var table strings.Builder
	table.WriteString("| taint | cause | effect | effect with `onUnhealthy: evict` |\n|---|---|---|---|\n")
	seen := map[string]health.Reason{}
	for _, r := range health.Reasons() {
		h := health.New(r, "detail")
		key := resourceslice.TaintKey(r)
		if before, ok := seen[key]; ok && r != health.ReasonMoving || !keyForm.MatchString(key) {
			t.Errorf("%s and %s: %s", before, r, key)
		}
		seen[key] = r
		one, evicting := resourceslice.TaintOf(h, false), resourceslice.TaintOf(h, true)
		switch r {
		case health.ReasonXID, health.ReasonEvent:
			value := map[health.Reason]string{health.ReasonXID: "number", health.ReasonEvent: "type in hexadecimal"}[r]
			fmt.Fprintf(&table, "| `%s=<%s>` | `%s_...` | None if degraded, NoSchedule if unhealthy | NoExecute if unhealthy, for codes that are faults of the hardware |\n", key, value, r)
		case health.ReasonLost:
			fmt.Fprintf(&table, "| `%s` | `%s` | %s | %s; NoSchedule if the driver only does not list the GPU |\n", key, r, one.Effect, evicting.Effect)
		case health.ReasonRecoveryAction:
			fmt.Fprintf(&table, "| `%s=<action>` | `RECOVERY_ACTION_...` | %s | %s |\n", key, one.Effect, evicting.Effect)
		case health.ReasonMoving:
			fmt.Fprintf(&table, "| `%s=%s` | `%s` | %s | %s |\n", key, one.Value, r, one.Effect, evicting.Effect)
		case health.ReasonOverlap:
			fmt.Fprintf(&table, "| `%s=<agent>` | `%s` | %s | %s |\n", key, r, one.Effect, evicting.Effect)
		default:
			fmt.Fprintf(&table, "| `%s` | `%s` | %s | %s |\n", key, r, one.Effect, evicting.Effect)
		}
	}
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(text), tableBegins)
	_, after, ends := strings.Cut(rest, tableEnds)
	if !begins || !ends {
		t.Fatalf("%s has no table of taints", document)
	}
	goldenfile.Compare(t, document, before+tableBegins+"\n"+table.String()+"\n"+tableEnds+after)
}
