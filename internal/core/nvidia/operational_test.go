package nvidia

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// startWith615 starts eight GPUs with a driver of branch 615, and with lines in the place of others of machine.conf.
func startWith615(t *testing.T, gpus ...string) *simdriver.Machine {
	t.Helper()
	text, err := simdriver.With615("h100x8")
	must(t, err)
	m := simdriver.StartText(t, text)
	for slot := range 8 {
		if len(gpus) > 0 {
			must(t, m.Change(slot, gpus...))
		}
	}
	return m
}

func operationalOf(at gpu.Placement, e health.OperationalEvent) health.Observation {
	return health.Observation{At: at, Kind: health.Operational, Operational: e}
}

func operationalXID(m *simdriver.Machine, slot int, code uint64) health.Observation {
	o := xid(m, slot, code)
	o.FromOperational = true
	return o
}

// An operational event is an observation of its GPU, with the numbers of the driver. Its XID is one more, if it is a fault.
func TestOperationalEvents(t *testing.T) {
	m := startWith615(t)
	s := openWithEvents(t, m)
	at := wholeGPU(m, 3)
	for _, c := range []struct {
		words []string
		want  []health.Observation
	}{
		{[]string{"module=GSP", "severity=40", "level=50", "code=7"},
			[]health.Observation{operationalOf(at, health.OperationalEvent{Module: "GSP", Code: 7, Severity: health.SeverityFatal})}},
		{[]string{"module=SIXTEEN-BYTES-XY", "severity=55", "level=99", "attributes=0x80000000"},
			[]health.Observation{operationalOf(at, health.OperationalEvent{Module: "SIXTEEN-BYTES-XY", Severity: 55, Attributes: 1 << 31})}},
		{[]string{"severity=30", "level=50", "context", "xid=95"}, []health.Observation{
			operationalOf(at, health.OperationalEvent{Severity: health.SeverityRecoverable, XID: 95}), operationalXID(m, 3, 95),
		}},
		{[]string{"severity=30", "level=50", "context"},
			[]health.Observation{operationalOf(at, health.OperationalEvent{Severity: health.SeverityRecoverable})}},
		{[]string{"severity=40", "level=50", "xid=79", "group_attributes=0x4"},
			[]health.Observation{operationalOf(at, health.OperationalEvent{Severity: health.SeverityFatal, XID: 79, GroupAttributes: 4})}},
		{[]string{"severity=40", "level=50", "xid=79", "attributes=0x4"},
			[]health.Observation{operationalOf(at, health.OperationalEvent{Severity: health.SeverityFatal, XID: 79, Attributes: 4})}},
		{[]string{"level=40", "attributes=0x40"}, []health.Observation{operationalOf(at, health.OperationalEvent{Attributes: 0x40})}},
	} {
		must(t, m.Operational(3, c.words...))
		obs, err := s.Wait(10 * time.Second)
		if must(t, err); !slices.Equal(obs, c.want) {
			t.Errorf("%q: %s", c.words, gocmp.Diff(c.want, obs))
		}
	}
	must(t, m.Operational(3, "severity=40", "level=30"), m.XID(3, 48)) // a notice is not received
	expectEvents(t, s, "below the level", 10*time.Second, xid(m, 3, 48))
}

// NVML's events come by the same wait, at their MIG instance. An event without the UUID of its GPU is of none, unless there is only one.
func TestEventsBesideOperationalOnes(t *testing.T) {
	m := startWith615(t)
	s := openWithEvents(t, m)
	n := counted(t, m, func() {
		must(t, m.XID(3, 79), m.XID(4, 94, simdriver.At{GI: 9, CI: 0}), m.Event(5, simdriver.EventDoubleBitECC, 0), m.Event(5, simdriver.EventRecoveryAction, 0))
		instance := xid(m, 4, 94)
		instance.At.GI, instance.At.CI = 9, 0
		expectEvents(t, s, "raised", 10*time.Second, xid(m, 3, 79), instance,
			health.Observation{At: wholeGPU(m, 5), Kind: health.Event, Code: 0x2}, health.Observation{At: wholeGPU(m, 5), Detail: "event 0x8000"})
	})
	if n["nvmlEventSetWait_v2"] > 0 || n[waitV3] != 5 {
		t.Errorf("%v", n)
	}
	must(t, m.Set(3, "event_uuid", "no"), m.XID(3, 79))
	expectEvents(t, s, "without a UUID", 10*time.Second, health.Observation{At: gpu.Node, Detail: "event 0x8"})
	must(t, m.Operational(3, "module=GSP", "severity=40", "level=50", "xid=79"))
	expectEvents(t, s, "without a UUID", 10*time.Second, operationalOf(gpu.Node, health.OperationalEvent{Module: "GSP", Severity: health.SeverityFatal, XID: 79}))
	for slot := range 8 {
		if slot != 3 {
			must(t, m.Remove(slot))
		}
	}
	snapshot(t, s)
	eventCounts(t, s) // that GPUs are removed
	must(t, m.XID(3, 79))
	awaitEvent(t, s, xid(m, 3, 79))
}

// Events of one group have their XID once; another group has it again.
func TestXIDOfAGroup(t *testing.T) {
	m := startWith615(t)
	s := openWithEvents(t, m)
	xids := func(when string, want int) {
		t.Helper()
		n := 0
		for o, times := range eventCounts(t, s) {
			if o.Kind == health.XID {
				n += times
			}
		}
		if n != want {
			t.Errorf("%s: %d XIDs, want %d", when, n, want)
		}
	}
	raise := func(words ...string) { must(t, m.Operational(3, append([]string{"level=50", "xid=95"}, words...)...)) }
	raise("group=7", "attributes=0x20")
	xids("the first event", 1)
	raise("group=7")
	xids("a later event of the group", 0)
	raise("group=8")
	xids("another group", 1)
	raise()
	xids("no group", 1)
	must(t, m.Operational(4, "level=50", "xid=95", "group=7"))
	xids("another GPU", 1)
}

// On a GPU in MIG mode the XID of an operational event, which names no instance, waits for the NVML event that does.
func TestOperationalXIDUnderMIG(t *testing.T) {
	m := startWith615(t)
	must(t, m.SetMIG(3, "1g.10gb", "1g.10gb"))
	now := time.Unix(0, 0)
	s := openWith(t, m, Options{Now: func() time.Time { return now }})
	snapshot(t, s)
	expectEvents(t, s, "at first", 0)
	must(t, m.Operational(3, "level=50", "xid=94"))
	expectEvents(t, s, "the event", 0, operationalOf(wholeGPU(m, 3), health.OperationalEvent{XID: 94}))
	must(t, m.XID(3, 94, simdriver.At{GI: 9, CI: 0}))
	instance := xid(m, 3, 94)
	instance.At.GI, instance.At.CI = 9, 0
	expectEvents(t, s, "the NVML event", 0, instance)
	now = now.Add(holdFor)
	expectEvents(t, s, "two seconds later", 0, operationalXID(m, 3, 94))
	expectEvents(t, s, "then", 0)
	must(t, m.Operational(3, "level=50", "xid=94"))
	expectEvents(t, s, "another one", 0, operationalOf(wholeGPU(m, 3), health.OperationalEvent{XID: 94}))
	must(t, m.Fail(simdriver.All, waitV3, "UNKNOWN", 1))
	if obs, err := s.Wait(0); err == nil || !slices.Equal(obs, []health.Observation{operationalXID(m, 3, 94)}) {
		t.Errorf("an error may end the session: %+v, %v", obs, err)
	}
}

// A driver without operational events, or whose library lacks one of their calls, has NVML's events as before, with the same calls.
func TestWithoutOperationalEvents(t *testing.T) {
	for _, c := range []struct {
		name   string
		start  func() *simdriver.Machine
		events health.Tristate
		old    bool // the older event wait is used
	}{
		{"older driver", func() *simdriver.Machine { return simdriver.Start(t, "h100x8") }, health.NotReported, true},
		{"not supported", func() *simdriver.Machine { return startWith615(t, "operational_events = none") }, health.NotReported, true},
		{"registration fails", func() *simdriver.Machine {
			m := startWith615(t)
			must(t, m.Fail(simdriver.All, registerOperational, "UNKNOWN", simdriver.Always))
			return m
		}, health.No, true},
		{"the wait is not supported", func() *simdriver.Machine {
			m := startWith615(t)
			must(t, m.Fail(simdriver.All, waitV3, "NOT_SUPPORTED", simdriver.Always))
			return m
		}, health.NotReported, true},
		{"supported", func() *simdriver.Machine { return startWith615(t) }, health.Yes, false},
	} {
		m := c.start()
		s := openWithEvents(t, m)
		n := counted(t, m, func() {
			must(t, m.Operational(3, "severity=40", "level=50", "xid=79"), m.XID(3, 48))
			if obs := eventCounts(t, s); obs[xid(m, 3, 48)] != 1 || len(obs) > 1 != (c.events == health.Yes) {
				t.Errorf("%s: %v", c.name, obs)
			}
		})
		if old := n["nvmlEventSetWait_v2"]; (old == 3) != c.old || (n[waitV3] > 1) == c.old || (n[contextCount] > 0) == c.old {
			t.Errorf("%s: %v", c.name, n)
		}
		if v := probe(t, s)[wholeGPU(m, 3).GPU].Sample; v.Events != health.Yes || v.OperationalEvents != c.events {
			t.Errorf("%s: events %v, operational events %v", c.name, v.Events, v.OperationalEvents)
		}
		must(t, m.Heal(), s.Close())
	}
}

// A GPU whose driver has no operational events, or whose registration for them fails, does not affect others.
func TestOneGPUWithoutOperationalEvents(t *testing.T) {
	m := startWith615(t)
	must(t, m.Set(2, "operational_events", "none"), m.Fail(simdriver.GPU(3), registerOperational, "INSUFFICIENT_RESOURCES", simdriver.Always))
	s := openWithEvents(t, m)
	for slot := 2; slot <= 4; slot++ {
		must(t, m.Operational(slot, "level=50", "xid=95"), m.XID(slot, 48))
	}
	expectEvents(t, s, "raised", 10*time.Second, xid(m, 2, 48), xid(m, 3, 48),
		operationalOf(wholeGPU(m, 4), health.OperationalEvent{XID: 95}), operationalXID(m, 4, 95), xid(m, 4, 48))
	obs := probe(t, s)
	for slot, want := range map[int]health.Tristate{2: health.NotReported, 3: health.No, 4: health.Yes} {
		if got := obs[wholeGPU(m, slot).GPU].Sample; got.OperationalEvents != want || got.Events != health.Yes {
			t.Errorf("GPU %d: %v, %v, want %v", slot, got.OperationalEvents, got.Events, want)
		}
	}
}

// A storm of operational events is one observation per Wait, and hides no XID.
func TestStormOfOperationalEvents(t *testing.T) {
	m := startWith615(t)
	s := openWithEvents(t, m)
	for range 300 {
		must(t, m.Operational(5, "severity=20", "level=40"))
	}
	must(t, m.XID(4, 95))
	all := eventCounts(t, s)
	if len(all) != 2 || all[xid(m, 4, 95)] != 1 || all[operationalOf(wholeGPU(m, 5), health.OperationalEvent{Severity: health.SeverityCorrected})] != 1 {
		t.Errorf("%v", all)
	}
}

// An operational event that may be of a fault makes the next check read all signals, another one does not.
func TestCheckAfterOperationalEvent(t *testing.T) {
	m := startWith615(t)
	s, at := openWithClock(t, m)
	at(0)
	expectEvents(t, s, "at first", 0)
	for i, c := range []struct {
		words []string
		all   bool
	}{{[]string{"level=40", "severity=20"}, false}, {[]string{"level=40", "severity=30"}, true}, {[]string{"level=40", "attributes=0x40"}, true},
		{[]string{"level=50", "severity=40", "group_attributes=4"}, false}} {
		must(t, m.Operational(3, c.words...))
		eventCounts(t, s)
		n := counted(t, m, func() { at(time.Duration(i+1) * 10 * time.Second) })
		if (n["nvmlDeviceGetTotalEccErrors"] == 1) != c.all {
			t.Errorf("%q: %v", c.words, n)
		}
	}
}

// Bank remapping and the fourth struct of the fabric are read where the driver has them.
func TestSampleOfNewerDriver(t *testing.T) {
	m := startWith615(t, "bank_remap_pending = no", "fabric_cluster = 5aa670e3-c604-50d0-9fe6-03876178f7cd", "fabric_clique = 32766")
	_, at := openWithClock(t, m)
	want := healthyH100
	want.BankRemapPending, want.OperationalEvents, want.Clique = health.No, health.Yes, "5aa670e3-c604-50d0-9fe6-03876178f7cd.32766"
	n := counted(t, m, func() {
		if diff := gocmp.Diff(want, at(0)(3).Sample); diff != "" {
			t.Error(diff)
		}
	})
	if n["nvmlDeviceGetGpuFabricInfo_v4"] != 8 || n["nvmlDeviceGetGpuFabricInfoV"] > 0 {
		t.Errorf("%v", n)
	}
	must(t, m.Change(3, "bank_remap_pending = yes", "fabric_clique_types = 0xe", "fabric_health_summary = 3", "fabric_health_mask = 0xa002"))
	want.BankRemapPending, want.Clique, want.Fabric = health.Yes, "", health.FabricLimited
	if diff := gocmp.Diff(want, at(time.Minute)(3).Sample); diff != "" {
		t.Errorf("without a clique of unicast pointers: %s", diff)
	}
	must(t, m.Change(3, "fabric_clique_types = 0x81", "fabric_health_summary = 9")) // a type and a summary of a later driver
	want.Clique, want.Fabric = "5aa670e3-c604-50d0-9fe6-03876178f7cd.32766", health.FabricHealthy
	if diff := gocmp.Diff(want, at(2*time.Minute)(3).Sample); diff != "" {
		t.Errorf("values of a later driver: %s", diff)
	}
	must(t, m.Change(3, "fabric_version = 3", "bank_remap_pending = none"))
	want.BankRemapPending = health.NotReported
	_, at = openWithClock(t, m)
	if diff := gocmp.Diff(want, at(0)(3).Sample); diff != "" {
		t.Errorf("without the fourth struct: %s", diff)
	}
}

// A library of branch 615 that lacks one of the calls of operational events is used like an older one: no call about them is made.
func TestLibraryWithoutOperationalCalls(t *testing.T) {
	text, err := simdriver.With615("a100-mig")
	must(t, err)
	file := filepath.Join(t.TempDir(), "machine.conf")
	must(t, os.WriteFile(file, []byte(text), 0o644))
	for _, missing := range []string{registerOperational, waitV3, contextCount, contextXID, ""} {
		m := install(t, file, strings.Fields(missing)...)
		out, err := runScenario(t, m.Root, "use all")
		if err != nil || strings.Count(out, "event true false\n") != 1 || !strings.Contains(out, "devices 20\n") {
			t.Errorf("without %s: %v: %s", missing, err, out)
		}
		n := calls(t, m)
		if has := missing == ""; n[registerOperational] > 0 != has || n[waitV3] > 0 != has || n["nvmlEventSetWait_v2"] > 0 == has {
			t.Errorf("without %s: %v", missing, n)
		}
	}
}
