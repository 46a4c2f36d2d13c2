package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

const (
	node      = "n1"
	condition = "TandemGPUsHealthy"
	second    = "GPUMissing"
)

// foreignNode is a Node with what others have written.
const foreignNode = `{"metadata":{"name":"n1","uid":"u1","labels":{"a":"b"},"annotations":{"other":"1"},"finalizers":["example.com/kept"]},` +
	`"spec":{"unschedulable":true,"taints":[{"key":"k","effect":"NoSchedule"}]},"status":{"capacity":{"nvidia.com/gpu":"8"},"images":[{"names":["x"],"sizeBytes":1}],` +
	`"conditions":[{"type":"Ready","status":"True","lastHeartbeatTime":"2026-11-27T12:00:00Z"},{"type":"KernelDeadlock","status":"False"}]}}`

// pods are the holders that the kubelet has, or why it has none.
type pods struct {
	record holders.Record
	err    error
}

// hold has the kubelet have holders, and no others.
func (f *fixture) hold(all ...holders.Holder) {
	f.pods.Store(&pods{record: holders.Record{Complete: true, Holders: all}})
}

// fixture is agents that hand over, one after the other, with an API server, in a synctest bubble.
type fixture struct {
	t      *testing.T
	server *kubeapitest.Server
	client *kubeapi.Client
	config core.Config
	states *watch.Value[core.State]
	checks atomic.Uint64
	pods   atomic.Pointer[pods]
	second string
	record *Record
	log    logbuffer.Buffer
	agent  *Handover
	stop   func()
}

func (f *fixture) State() core.State            { return f.states.Load() }
func (f *fixture) Watchdog() *watchdog.Registry { return nil }
func (f *fixture) Changed() <-chan struct{}     { return f.states.Changed() }

// newFixture has a Node that the policy guards, and runs no agent.
func newFixture(t *testing.T) *fixture {
	f := &fixture{t: t, server: kubeapitest.NewInMemory(), config: core.DefaultConfig(), record: &Record{Path: filepath.Join(t.TempDir(), "r.json")}}
	f.config.Retire = 0
	f.hold()
	client, err := kubeapi.New(kubeapi.Options{Address: f.server.URL, Dial: f.server.Dial})
	check.NoError(t, err)
	f.client = client
	f.server.PutRawNode(node, []byte(foreignNode))
	f.server.GuardNodes(faultreport.Annotation, condition, second)
	f.states = watch.NewValue(core.NewState(f.config))
	f.stop = func() {}
	return f
}

func (f *fixture) close() {
	f.stop()
	f.client.CloseIdleConnections()
	f.server.Close()
}

// start starts an agent, which has read nothing; f.stop ends it.
func (f *fixture) start() {
	ctx, cancel := context.WithCancel(f.t.Context())
	f.states = watch.NewValue(core.NewState(f.config))
	f.checks.Store(0)
	f.agent = New(Options{
		API: f.client, Node: node, Condition: condition, Second: f.second, Events: true, Boot: "b1", Mode: f.config.Health.Mode,
		Checks: f.checks.Load, Record: f.record, Log: slog.New(slog.NewTextHandler(&f.log, nil)),
		Devices: deviceplugin.Schedulable,
		Holders: func(context.Context, *inventory.Allocatable) (holders.Record, error) {
			p := f.pods.Load()
			return p.record, p.err
		},
	})
	done := make(chan struct{})
	go func() { f.agent.Run(ctx, f); close(done) }()
	f.stop = func() { cancel(); <-done; f.stop = func() {} }
	synctest.Wait()
}

// read publishes the state after a reading of eight GPUs and a round of checks.
func (f *fixture) read(obs ...health.Observation) {
	f.checks.Add(1)
	f.states.Store(f.states.Load().Read(f.config, time.Now(), coretest.GPUs(8), obs...))
	synctest.Wait()
}

// set publishes the state of eight GPUs with these faults alone.
func (f *fixture) set(obs ...health.Observation) {
	f.checks.Add(1)
	f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), coretest.GPUs(8), obs...))
	synctest.Wait()
}

func xid(n int, code uint64) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.XID, Code: code}
}

func lost(n int) health.Observation {
	return health.Observation{At: gpu.WholeGPU(coretest.GPU(n)), Kind: health.Lost, Detail: "not listed by the driver"}
}

// of returns a condition of the Node; Status "" = it has none.
func (f *fixture) of(name string) kubeapi.NodeCondition {
	f.t.Helper()
	var n struct {
		Status struct{ Conditions []kubeapi.NodeCondition }
	}
	check.NoError(f.t, json.Unmarshal(f.server.RawNode(node), &n))
	i := slices.IndexFunc(n.Status.Conditions, func(c kubeapi.NodeCondition) bool { return c.Type == name })
	if i < 0 {
		return kubeapi.NodeCondition{}
	}
	return n.Status.Conditions[i]
}

// faults returns the report of the Node, and whether it has one.
func (f *fixture) faults() (faultreport.Report, bool) {
	f.t.Helper()
	var n struct {
		Metadata struct{ Annotations map[string]string }
	}
	check.NoError(f.t, json.Unmarshal(f.server.RawNode(node), &n))
	text, ok := n.Metadata.Annotations[faultreport.Annotation]
	if !ok {
		return faultreport.Report{}, false
	}
	r, err := faultreport.Parse(text)
	check.NoError(f.t, err)
	return r, true
}

func (f *fixture) want(when string, status kubeapi.ConditionStatus, faults int) {
	f.t.Helper()
	synctest.Wait()
	r, _ := f.faults()
	if c := f.of(condition); c.Status != status || len(r.Faults) != faults {
		f.t.Errorf("%s: condition %+v, faults %+v; want %q and %d", when, c, r.Faults, status, faults)
	}
}

// requests are those since the last call, as verb and resource.
func (f *fixture) requests() (all []string) {
	synctest.Wait()
	for _, r := range f.server.Requests() {
		text := r.Verb + " " + r.Resource
		if r.DryRun {
			text += " (dry run)"
		}
		all = append(all, text)
	}
	f.server.ForgetRequests()
	return all
}

func (f *fixture) wantProblem(code problem.Code, texts ...string) {
	f.t.Helper()
	synctest.Wait()
	all := f.agent.Problems()
	if len(all) != 1 || all[0].Code != code {
		f.t.Errorf("problems %+v, want %s", all, code)
		return
	}
	for _, text := range texts {
		if !strings.Contains(all[0].String(), text) {
			f.t.Errorf("%q lacks %q", all[0], text)
		}
	}
}

// The life of a fault: one request at its beginning and at its end, renewals while it lasts, and none without one. The time of the transition is that
// of the status.
func TestFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.second = second
		f.start()
		f.read()
		f.want("healthy", kubeapi.ConditionTrue, 0)
		if c := f.of(second); c.Status != kubeapi.ConditionFalse {
			t.Errorf("a condition that names a problem: %+v", c)
		}
		if got := f.requests(); !slices.Equal(got, []string{"get nodes", "patch nodes/status (dry run)", "patch nodes/status"}) {
			t.Errorf("at the start %q", got)
		}
		time.Sleep(59 * time.Minute)
		f.read()
		if got := f.requests(); len(got) > 0 {
			t.Errorf("an idle hour: %q", got)
		}

		f.read(xid(3, 95))
		f.want("XID 95", kubeapi.ConditionFalse, 1)
		began := f.of(condition)
		if c := f.of(second); c.Status != kubeapi.ConditionTrue || !c.LastTransitionTime.Equal(time.Now().Truncate(time.Second)) {
			t.Errorf("%+v", c)
		}
		if want := string(coretest.GPU(3)) + " (0000:13:00.0) needs a reset: XID_95."; began.Message != want || began.Reason != reasonFault {
			t.Errorf("%+v, want %q", began, want)
		}
		if got := f.requests(); !slices.Equal(got, []string{"patch nodes/status"}) {
			t.Errorf("at the fault %q", got)
		}
		r, _ := f.faults()
		want := faultreport.Fault{
			GPU: coretest.GPU(3), PCI: "0000:13:00.0", State: health.Unhealthy, Repair: health.Reset, Cause: "XID_95", Since: r.Faults[0].Since, HoldersKnown: true,
		}
		if fmt.Sprint(r.Faults[0]) != fmt.Sprint(want) || r.Devices[kubeadapter.GPUResource] != 7 || r.Boot != "b1" || !r.At.Equal(time.Now()) {
			t.Errorf("%+v", r)
		}

		time.Sleep(5*time.Minute + time.Second)
		if got := f.requests(); len(got) < 10 || len(got) > 12 {
			t.Errorf("%d requests in five minutes of a fault: %q", len(got), got)
		}
		if c := f.of(condition); !c.LastTransitionTime.Equal(*began.LastTransitionTime) || !c.LastHeartbeatTime.After(*began.LastHeartbeatTime) {
			t.Errorf("renewed %+v", c)
		}
		f.set()
		f.want("recovered", kubeapi.ConditionTrue, 0)
		if _, ok := f.faults(); ok || len(f.agent.Problems()) > 0 {
			t.Errorf("the annotation is left: %t; %v", ok, f.agent.Problems())
		}
		f.requests()
		time.Sleep(time.Hour)
		if got := f.requests(); len(got) > 0 {
			t.Errorf("after the recovery: %q", got)
		}
	})
}

// What is no fault of the hardware that counts does not change the condition, and is in the annotation with its mark.
func TestVerdicts(t *testing.T) {
	simulated := xid(1, 95)
	simulated.Simulated = true
	hangs := health.Observation{At: gpu.WholeGPU(coretest.GPU(1)), Kind: health.Unresponsive, Detail: "nvmlDeviceGetTemperature"}
	none := health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Detail: "no library"}
	released := health.Observation{At: gpu.Node, Kind: health.DriverUnavailable, Code: uint64(gpu.DriverReleased)}
	for name, c := range map[string]struct {
		mode    health.Mode
		obs     []health.Observation
		want    kubeapi.ConditionStatus
		faults  int
		message string
	}{
		"healthy":                     {health.ModeEnforce, nil, "True", 0, "No GPU needs a repair."},
		"degraded":                    {health.ModeEnforce, []health.Observation{xid(1, 63)}, "True", 0, "No GPU"},
		"application fault":           {health.ModeEnforce, []health.Observation{xid(1, 13)}, "True", 0, "No GPU"},
		"simulated":                   {health.ModeEnforce, []health.Observation{simulated}, "True", 1, "No GPU"},
		"reported only":               {health.ModeObserve, []health.Observation{xid(1, 95)}, "True", 1, "No GPU"},
		"mode off":                    {health.ModeOff, []health.Observation{xid(1, 95)}, "True", 0, "No GPU"},
		"a call hangs":                {health.ModeEnforce, []health.Observation{hangs}, "Unknown", 1, "can't be checked: NOT_ANSWERING"},
		"no driver":                   {health.ModeEnforce, []health.Observation{none}, "Unknown", 0, "can't be checked: NVML_UNAVAILABLE"},
		"maintenance":                 {health.ModeEnforce, []health.Observation{xid(1, 95), released}, "Unknown", 1, "can't be checked: MAINTENANCE"},
		"a fault, and then no driver": {health.ModeEnforce, []health.Observation{xid(1, 95), none}, "False", 1, "needs a reset: XID_95"},
		"worst first": {health.ModeEnforce, []health.Observation{xid(1, 95), xid(0, 95), lost(2)}, "False", 3,
			fmt.Sprintf("%s (0000:12:00.0) needs a reboot of the node: LOST; %s (0000:10:00.0) needs a reset: XID_95; %s (0000:11:00.0) needs a reset: XID_95.", coretest.GPU(2), coretest.GPU(0), coretest.GPU(1))},
	} {
		cfg := core.DefaultConfig()
		cfg.Health.Mode = c.mode
		now := time.Unix(1e9, 0)
		s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(4), c.obs...)
		v := Of(s, c.mode, now.Add(time.Hour), Begun{now, 9})
		if v.Pending || v.Sound != c.want || len(v.Faults) != c.faults || !strings.Contains(v.Message, c.message) {
			t.Errorf("%s: %+v", name, v)
		}
		for _, f := range v.Faults {
			if f.Simulated != (name == "simulated") || f.Advisory != (name == "reported only") {
				t.Errorf("%s: %+v", name, f)
			}
		}
	}
}

// GPUs whose earlier faults are not known are not reported as sound.
func TestUnknownFaultsAreNotSound(t *testing.T) {
	cfg := core.DefaultConfig()
	now := time.Unix(1e9, 0)
	lost := core.Checkpoint{BootID: "a"}.WithUnknownFaults(now)
	v := Of(core.Restore(cfg, lost, "a").Read(cfg, now, coretest.GPUs(2)), health.ModeEnforce, now.Add(time.Hour), Begun{now, 9})
	if v.Sound != kubeapi.ConditionUnknown || len(v.Faults) > 0 || !strings.Contains(v.Message, "FAULTS_UNKNOWN") {
		t.Errorf("%+v", v)
	}
}

// A fault of a GPU that the configuration does not offer is not one of this agent's.
func TestNotOffered(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Exclude = []gpu.DeviceID{coretest.GPU(1)}
	now := time.Unix(1e9, 0)
	s := core.NewState(cfg).Read(cfg, now, coretest.GPUs(2), xid(1, 95))
	if v := Of(s, health.ModeEnforce, now.Add(time.Hour), Begun{now, 9}); v.Sound != kubeapi.ConditionTrue || len(v.Faults) > 0 || v.GPUs != 1 {
		t.Errorf("%+v", v)
	}
}

// A fault of a MIG instance names it, and of the pods on the GPU those that have it.
func TestInstance(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.MIG = inventory.MIGMixed
	now := time.Unix(1e9, 0)
	snapshot := coretest.WithMIG(coretest.GPUs(1), 0, "1g.10gb", "1g.10gb")
	first := slices.IndexFunc(snapshot.Devices, func(d gpu.Device) bool { return d.At.GI != gpu.Whole })
	at, uid := snapshot.Devices[first].At, fmt.Sprint("u", first)
	s := core.NewState(cfg).Read(cfg, now, snapshot, health.Observation{At: at, Kind: health.ProbeFailed}, health.Observation{At: at, Kind: health.ProbeFailed}, health.Observation{At: at, Kind: health.ProbeFailed})
	v := Of(s, health.ModeEnforce, now.Add(time.Hour), Begun{now, 9})
	pods := holders.Record{Complete: true}
	for i, d := range snapshot.Devices {
		if d.At.GI == gpu.Whole {
			continue // it is divided: no pod has all of it
		}
		pods.Holders = append(pods.Holders, holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: fmt.Sprint("p", i), ID: fmt.Sprint("u", i)}, At: d.At})
	}
	faults := held(v.Faults, pods)
	if len(faults) != 1 || faults[0].Placement() != at || faults[0].GI == nil || !slices.Equal(faults[0].Holders, []string{uid}) || !faults[0].HoldersKnown {
		t.Errorf("%+v", faults)
	}
}

// After a start nothing is written until the GPUs were checked, and until what the first check alone shows is confirmed. So the fault of before
// neither ends nor begins again (case 34).
func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.start()
		f.read()
		f.read(lost(2))
		f.want("lost", kubeapi.ConditionFalse, 1)
		began := f.of(condition)
		f.stop()
		before := string(f.server.RawNode(node))

		time.Sleep(10 * time.Minute)
		f.requests()
		f.start()
		time.Sleep(20 * time.Second)
		f.read(lost(2))
		time.Sleep(5 * time.Second)
		if got := f.requests(); len(got) > 0 || string(f.server.RawNode(node)) != before {
			t.Errorf("before the second check: %q, Node %s", got, f.server.RawNode(node))
		}
		f.read(lost(2))
		time.Sleep(pendingEvery)
		f.want("confirmed", kubeapi.ConditionFalse, 1)
		if c := f.of(condition); !c.LastTransitionTime.Equal(*began.LastTransitionTime) {
			t.Errorf("the restart began the fault again: %+v, was %+v", c, began)
		}
	})
}

// An agent is killed, the GPU recovers meanwhile: the condition is True within 10 s of the next agent's start (case 16).
func TestRecoveredWithoutAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.start()
		f.read(xid(3, 95))
		f.read()
		f.want("faulty", kubeapi.ConditionFalse, 1)
		f.stop()
		time.Sleep(time.Hour)
		f.start()
		time.Sleep(3 * time.Second)
		f.read()
		time.Sleep(pendingEvery)
		f.want("3 s after the start", kubeapi.ConditionTrue, 0)
	})
}

// Two causes alternate each second for 20 minutes: for a repair system that repairs a node whose condition was False for 10 minutes, that is one
// fault (case 15). It is not one request each second.
func TestAlternatingCauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.start()
		f.read()
		var since time.Time
		repairs := 0
		f.requests()
		for second := range 20 * 60 {
			f.set([]health.Observation{xid(1, 95), lost(2)}[second%2])
			c := f.of(condition)
			if since.IsZero() {
				since = *c.LastTransitionTime
			}
			if c.Status != kubeapi.ConditionFalse || !c.LastTransitionTime.Equal(since) {
				t.Fatalf("after %d s: %+v", second, c)
			}
			if repairs == 0 && time.Since(*c.LastTransitionTime) >= 10*time.Minute {
				repairs++
			}
			time.Sleep(time.Second)
		}
		if n := len(f.requests()); repairs != 1 || n > 20*60/5+10 {
			t.Errorf("%d repairs, %d requests", repairs, n)
		}
	})
}

// Labels, taints, conditions and annotations of others have equal bytes before and after 100 faults (case 17).
func TestForeignPartsStay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		before := f.server.RawNode(node)
		f.second = second
		f.start()
		for i := range 100 {
			f.set(xid(i%8, 95))
			time.Sleep(40 * time.Second)
			f.set()
			time.Sleep(time.Minute)
		}
		f.want("after all", kubeapi.ConditionTrue, 0)
		f.stop()
		back := TakeBack{API: f.client, Node: node, Record: f.record}
		back.Run(t.Context(), slog.New(slog.DiscardHandler))
		version := regexp.MustCompile(`"resourceVersion":"[0-9]+"`)
		if after := f.server.RawNode(node); version.ReplaceAllString(string(after), "") != version.ReplaceAllString(string(before), "") {
			t.Errorf("left %s\nwant %s", after, before)
		}
		if len(back.Stale()) > 0 || len(back.Problems()) > 0 {
			t.Errorf("%q, %v", back.Stale(), back.Problems())
		}
	})
}

// Without an admission policy nothing is written, whatever happens, until there is one.
func TestUnguarded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.server.UnguardNodes()
		before := string(f.server.RawNode(node))
		f.start()
		f.read(xid(3, 95))
		f.wantProblem(problem.Unguarded, "no admission policy", "apply deploy/hand-over")
		time.Sleep(time.Hour)
		if after := string(f.server.RawNode(node)); after != before {
			t.Errorf("written %s", after)
		}
		f.server.GuardNodes(faultreport.Annotation, condition)
		time.Sleep(2 * retryMost)
		f.want("guarded", kubeapi.ConditionFalse, 1)
		if all := f.agent.Problems(); len(all) > 0 || strings.Count(f.log.String(), "no admission policy") != 1 {
			t.Errorf("%v; log %s", all, f.log.String())
		}
	})
}

// Missing rights, and a policy for other types, are problems that name what has them. What failed is written later.
func TestForbidden(t *testing.T) {
	for name, c := range map[string]struct {
		begin, end func(*kubeapitest.Server)
		texts      []string
	}{
		"no right to patch": {
			func(s *kubeapitest.Server) { s.Deny("patch", "nodes/status") }, func(s *kubeapitest.Server) { s.Allow("patch", "nodes/status") },
			[]string{"patch nodes/status n1", "403", "apply deploy/hand-over (chart: handOver.enabled)"},
		},
		"no right to read": {
			func(s *kubeapitest.Server) { s.Deny("get", "nodes") }, func(s *kubeapitest.Server) { s.Allow("get", "nodes") },
			[]string{"get nodes n1", "apply deploy/hand-over"},
		},
		"a policy for another type": {
			func(s *kubeapitest.Server) { s.GuardNodes(faultreport.Annotation, "Other") }, func(s *kubeapitest.Server) { s.GuardNodes(faultreport.Annotation, condition) },
			[]string{"its own conditions only: Other", "with the condition types of this agent"},
		},
		"no server": {
			func(s *kubeapitest.Server) { s.SetDown(true) }, func(s *kubeapitest.Server) { s.SetDown(false) }, []string{"get nodes n1", "connection refused"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				defer f.close()
				c.begin(f.server)
				f.start()
				f.read(xid(3, 95))
				f.wantProblem(problem.HandOver, c.texts...)
				time.Sleep(time.Hour)
				if n := len(f.requests()); n > 200 {
					t.Errorf("%d requests in an hour", n)
				}
				c.end(f.server)
				time.Sleep(2 * retryMost)
				f.want("later", kubeapi.ConditionFalse, 1)
				if all := f.agent.Problems(); len(all) > 0 {
					t.Error(all)
				}
			})
		})
	}
}

// The API server has carried out a write whose answer is lost, and the GPU recovers before the next one: nothing of the fault stays on the Node, by which a
// repair system would end a healthy one.
func TestAnswerLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.start()
		f.read()
		f.want("healthy", kubeapi.ConditionTrue, 0)
		f.server.Fail("patch", 1, kubeapitest.Failure{Applied: true})
		f.read(xid(3, 95))
		f.want("the answer is lost", kubeapi.ConditionFalse, 1)
		f.set()
		time.Sleep(retryMost)
		f.want("recovered", kubeapi.ConditionTrue, 0)
		if _, ok := f.faults(); ok {
			t.Error("the annotation is left")
		}

		f.read(xid(3, 95))
		f.want("again", kubeapi.ConditionFalse, 1)
		f.server.Fail("patch", 1, kubeapitest.Failure{Applied: true})
		f.set()
		f.read(xid(3, 95))
		time.Sleep(retryMost)
		f.want("a recovery of which the answer is lost", kubeapi.ConditionFalse, 1)
	})
}

// Pods that have the faulty GPU are named, and get one event for each fault. A record that may lack a pod, or the UID of one, is reported as not complete.
func TestHolders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		pod := func(n int, name, uid string) holders.Holder {
			return holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: name, Container: "c", ID: uid}, Device: coretest.GPU(n)}
		}
		f.hold(pod(3, "train", "u3"), pod(3, "train", "u3"), pod(4, "other", "u4"))
		f.start()
		f.read(xid(3, 95))
		f.read()
		wantHolders := func(when string, known bool, uids ...string) {
			t.Helper()
			synctest.Wait()
			r, _ := f.faults()
			if len(r.Faults) != 1 || r.Faults[0].HoldersKnown != known || !slices.Equal(r.Faults[0].Holders, uids) {
				t.Errorf("%s: %+v", when, r.Faults)
			}
		}
		wantHolders("one pod", true, "u3")
		all := f.server.Events()
		if len(all) != 1 || all[0].Regarding != (kubeapi.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "team", Name: "train", UID: "u3"}) ||
			all[0].ReportingController != "tandem.dev/k8s-gpu" || all[0].ReportingInstance != node || !strings.Contains(all[0].Note, "needs a reset: XID_95, since 2000-01-01T00:00Z") {
			t.Fatalf("%+v", all)
		}
		f.hold(pod(3, "train", "u3"), pod(4, "other", "u4"), pod(3, "late", "u5"), pod(3, "", ""))
		time.Sleep(faultreport.Renewed)
		wantHolders("a pod that was just admitted", false, "u3", "u5")
		f.pods.Store(&pods{err: errors.New("no kubelet")})
		time.Sleep(faultreport.Renewed)
		wantHolders("no record", false)
		f.hold()
		time.Sleep(holdersEvery)
		wantHolders("all have ended", true)
		if n := len(f.server.Events()); n != 2 {
			t.Errorf("%d events", n)
		}

		f.hold(pod(3, "train", "u3"))
		f.server.Fail("create", 1, kubeapitest.Failure{Code: 503})
		time.Sleep(holdersEvery)
		f.wantProblem(problem.HandOver, "create events")
		time.Sleep(10 * time.Second)
		if all := f.agent.Problems(); len(all) > 0 || len(f.server.Events()) != 2 {
			t.Errorf("%v, %d events", all, len(f.server.Events()))
		}
	})
}

// Without the right to create events the report is renewed in time all the same: a reader takes one of 90 s for that of an agent that has ended.
func TestEventsFail(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.hold(holders.Holder{Work: holders.Work{Orchestrator: holders.Kubernetes, Namespace: "team", Name: "train", ID: "u3"}, Device: coretest.GPU(3)})
		f.server.Deny("create", "events")
		f.start()
		f.read()
		f.read(xid(3, 95))
		f.wantProblem(problem.HandOver, `resources: ["events"], verbs: ["create"]`, "apply deploy/hand-over")
		for range 600 {
			time.Sleep(time.Second)
			if r, _ := f.faults(); time.Since(r.At) > faultreport.Renewed+time.Second {
				t.Fatalf("the report is %v old", time.Since(r.At))
			}
		}
		f.server.Allow("create", "events")
		time.Sleep(2 * retryMost)
		if all := f.agent.Problems(); len(all) > 0 || len(f.server.Events()) != 1 {
			t.Errorf("%v, %d events", all, len(f.server.Events()))
		}
	})
}

// A node without GPUs gets no condition. One that had GPUs keeps none that no agent clears.
func TestNoGPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		before := string(f.server.RawNode(node))
		f.start()
		f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), gpu.NoDriver(gpu.DriverAbsent, "no library")))
		time.Sleep(time.Hour)
		if got := f.requests(); !slices.Equal(got, []string{"get nodes"}) || string(f.server.RawNode(node)) != before {
			t.Errorf("%q: %s", got, f.server.RawNode(node))
		}
		f.read()
		f.want("GPUs", kubeapi.ConditionTrue, 0)
		f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), gpu.NoDriver(gpu.DriverAbsent, "no library")))
		f.want("without a driver again", kubeapi.ConditionUnknown, 0)
	})
}

// What no setting names any more is removed once, also by an agent that is told to hand over nothing; the rest stays.
func TestTakeBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		defer f.close()
		f.second = second
		f.start()
		f.read(xid(3, 95))
		f.read()
		f.stop()
		log := slog.New(slog.NewTextHandler(&f.log, nil))
		renamed := TakeBack{API: f.client, Node: node, Record: f.record, Keep: []string{condition, ""}}
		if stale := renamed.Stale(); !slices.Equal(stale, []string{second}) {
			t.Fatalf("stale %q", stale)
		}
		go renamed.Run(t.Context(), log)
		if f.want("without the second one", kubeapi.ConditionFalse, 1); f.of(second).Status != "" {
			t.Errorf("left %+v", f.of(second))
		}
		// The agent of the settings before is still there, and writes once more.
		var p kubeapi.NodePatch
		p.Status.Conditions = []kubeapi.NodeCondition{{Type: second, Status: kubeapi.ConditionTrue}}
		check.NoError(t, f.client.PatchNodeStatus(t.Context(), node, p, kubeapi.Store))
		time.Sleep(removeAgain + time.Second)
		if f.of(second).Status != "" || len(renamed.Stale()) > 0 {
			t.Errorf("left %+v, stale %q", f.of(second), renamed.Stale())
		}
		f.server.Deny("patch", "nodes/status")
		off := TakeBack{API: f.client, Node: node, Record: f.record}
		done := make(chan struct{})
		go func() { off.Run(t.Context(), log); close(done) }()
		time.Sleep(time.Minute)
		if all := off.Problems(); len(all) != 1 || !strings.Contains(all[0].String(), "no agent changes any more: "+condition) {
			t.Errorf("%v", all)
		}
		f.server.Allow("patch", "nodes/status")
		<-done
		f.want("off", "", 0)
		f.requests()
		if off.Run(t.Context(), log); len(f.requests()) > 0 || len(off.Problems()) > 0 || len(off.Stale()) > 0 {
			t.Errorf("%v, %q", off.Problems(), off.Stale())
		}
	})
}

// A condition of a Node names a problem, or the sound state.
func TestPolarity(t *testing.T) {
	for name, want := range map[string]bool{condition: false, "AcceleratedHardwareReady": false, "GPUMissing": true, "example.com/GPUProblem": true, "GPUNotReady": true, "Unhealthy": true} {
		if namesProblem(name) != want {
			t.Errorf("%s is %t while a GPU is faulty", name, !want)
		}
	}
}

// The API server stores any text as a status: all that can be written are those that it defines.
func TestStatuses(t *testing.T) {
	for _, sound := range []kubeapi.ConditionStatus{kubeapi.ConditionTrue, kubeapi.ConditionFalse, kubeapi.ConditionUnknown} {
		for _, name := range []string{condition, second} {
			if got := statusOf(name, Verdict{Sound: sound}); got != "True" && got != "False" && got != "Unknown" {
				t.Errorf("%s: %q", name, got)
			}
		}
	}
}
