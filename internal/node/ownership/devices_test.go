package ownership

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

var now = time.Date(2026, 11, 21, 18, 0, 0, 0, time.UTC)

func whole(n int) gpu.Placement { return gpu.WholeGPU(coretest.GPU(n)) }

func instance(n int, gi uint32) gpu.Placement {
	return gpu.Placement{GPU: coretest.GPU(n), GI: gi, CI: 0}
}

// want are the devices of a node where every GPU was read.
func want(at ...gpu.Placement) localDevices {
	return localDevices{at: sortedPlacements(at), unsure: func(gpu.Placement) bool { return false }, ready: true}
}

func recorded(agent string, order uint64, at ...gpu.Placement) agentFile {
	e := agentFile{agent: agent}
	for _, p := range at {
		e.devices = append(e.devices, device{at: p, order: order, since: now})
	}
	return e
}

// unreadFile is the file of an agent that can't be used.
func unreadFile(agent string) agentFile {
	return agentFile{agent: agent, unknown: func(gpu.DeviceID) bool { return true }}
}

func placements(all []device) (at []gpu.Placement) {
	for _, c := range all {
		at = append(at, c.at)
	}
	return at
}

func TestNextDevices(t *testing.T) {
	nomad := recorded("nomad-gpu", 5, whole(0), whole(1))
	for _, tc := range []struct {
		name         string
		mine         agentFile
		others       []agentFile
		localDevices localDevices
		refuse       bool
		want         []device
	}{
		{"no other agent", recorded("k8s-gpu", 0), nil, want(whole(0)), true, []device{{whole(0), 1, now}}},
		{"warn: both", recorded("k8s-gpu", 0), []agentFile{nomad}, want(whole(1), whole(2)), false, []device{{whole(1), 6, now}, {whole(2), 6, now}}},
		{"refuse: the other was first", recorded("k8s-gpu", 0), []agentFile{nomad}, want(whole(1), whole(2)), true, []device{{whole(2), 6, now}}},
		{"refuse: we were first", recorded("k8s-gpu", 2, whole(1)), []agentFile{nomad}, want(whole(1)), true, []device{{whole(1), 2, now}}},
		{"no longer offered", recorded("k8s-gpu", 2, whole(1), whole(2)), nil, want(whole(2)), true, []device{{whole(2), 2, now}}},
		{"partitioned: the instances were recorded with the GPU", recorded("k8s-gpu", 2, whole(0)), []agentFile{nomad},
			want(instance(0, 1), instance(0, 2)), true, []device{{instance(0, 1), 2, now}, {instance(0, 2), 2, now}}},
		{"MIG disabled: the GPU is more than was recorded", recorded("k8s-gpu", 2, instance(0, 1)), []agentFile{nomad}, want(whole(0)), true, nil},
		{"two instances are not the same hardware", recorded("k8s-gpu", 0), []agentFile{recorded("nomad-gpu", 1, instance(0, 1))},
			want(instance(0, 2)), true, []device{{instance(0, 2), 2, now}}},
		{"equal orders: by name", recorded("k8s-gpu", 5, whole(1)), []agentFile{nomad}, want(whole(1)), true, []device{{whole(1), 5, now}}},
		{"equal orders: the other's name is less", recorded("z", 5, whole(1)), []agentFile{nomad}, want(whole(1)), true, nil},
		{"refuse: the other may offer what we have not recorded", recorded("k8s-gpu", 2, whole(1)), []agentFile{unreadFile("nomad-gpu")},
			want(whole(1), whole(2)), true, []device{{whole(1), 2, now}}},
		{"warn: the other may offer it", recorded("k8s-gpu", 2, whole(1)), []agentFile{unreadFile("nomad-gpu")},
			want(whole(1), whole(2)), false, []device{{whole(1), 2, now}, {whole(2), 3, now}}},
		{"unreadable: the record stays", recorded("k8s-gpu", 2, whole(3)), nil,
			localDevices{unsure: func(gpu.Placement) bool { return true }}, true, []device{{whole(3), 2, now}}},
		{"the highest order", recorded("k8s-gpu", maxOrder, whole(3)), nil, want(whole(3), whole(4)), true,
			[]device{{whole(3), maxOrder, now}, {whole(4), maxOrder, now}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			others := slices.Clone(tc.others)
			if got := nextDevices(tc.mine, others, tc.localDevices, tc.refuse, now); !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

// The core decides as the files do: exactly the devices that this agent has recorded take work.
func TestCoreAndFilesAgree(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 1))
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	state := core.NewState(cfg).Read(cfg, now, coretest.GPUs(8))
	for range 2000 {
		mine, other := agentFile{agent: "k8s-gpu"}, agentFile{agent: "nomad-gpu"}
		for n := range 8 {
			if random.IntN(2) == 0 {
				mine.devices = append(mine.devices, device{at: whole(n), order: random.Uint64N(4)})
			}
			switch random.IntN(3) {
			case 0:
				other.devices = append(other.devices, device{at: whole(n), order: random.Uint64N(4)})
			case 1:
				other.devices = append(other.devices, device{at: instance(n, 3), order: random.Uint64N(4)})
			}
		}
		o := localDevicesOf(state)
		mine.devices = nextDevices(mine, []agentFile{other}, o, true, now)
		host := inventory.Host{Peers: overlapsOf(mine, []agentFile{other}, o)}
		for _, own := range []inventory.Recorded{{}, {Reason: elseUnrecorded, At: placements(mine.devices)}} {
			host.Recorded = own
			for u := range state.WithHost(cfg, now, host).Allocatable.Units() {
				if ours := mine.oldestOver(u.Device.At) != nil; ours != u.Health.Schedulable() {
					t.Fatalf("%v: recorded %v, health %v\nmine %v\nother %v", u.Device.At, ours, u.Health, mine.devices, other.devices)
				}
			}
		}
	}
}

// Hardware that an agent reads for the first time belongs to the other one that has recorded it, without a further update.
func TestNewHardwareBelongsToTheOther(t *testing.T) {
	overlaps := overlapsOf(recorded("k8s-gpu", 1, whole(0)), []agentFile{recorded("nomad-gpu", 2, whole(0), whole(5))}, want(whole(0)))
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	state := core.NewState(cfg).WithHost(cfg, now, inventory.Host{Peers: overlaps}).Read(cfg, now, coretest.GPUs(8))
	for u := range state.Allocatable.Units() {
		if want := u.Device.At != whole(5); u.Health.Schedulable() != want {
			t.Errorf("%v: %v", u.Device.At, u.Health)
		}
	}
	if c := state.Allocatable.Overlaps(); len(c) != 2 {
		t.Errorf("overlaps: %v", c)
	}
}

func TestOffer(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Exclude = []gpu.DeviceID{coretest.GPU(2)}
	cfg.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
	s := core.NewState(cfg)
	if o := localDevicesOf(s); len(o.at) != 0 || !o.unsure(whole(0)) {
		t.Errorf("before the first reading: %v", o.at)
	}
	reading := coretest.GPUs(3)
	s = s.Read(cfg, now, reading)
	o := localDevicesOf(s)
	if !slices.Equal(o.at, []gpu.Placement{whole(0), whole(1)}) || o.unsure(whole(2)) || o.unsure(whole(7)) {
		t.Errorf("offered: %v", o.at)
	}
	reading.Excluded = []gpu.Exclusion{{Index: 7, At: whole(7), Failure: gpu.FailureError, Reason: "Unknown Error"}}
	if o := localDevicesOf(core.NewState(cfg).Read(cfg, now, reading)); !o.unsure(whole(7)) || o.unsure(whole(2)) || o.unsure(whole(6)) {
		t.Error("a GPU that can't be read stays recorded, an excluded one does not")
	}
	reading.Excluded = []gpu.Exclusion{{Index: 7, Failure: gpu.FailureError, Reason: "Unknown Error"}}
	if o := localDevicesOf(core.NewState(cfg).Read(cfg, now, reading)); !o.unsure(whole(7)) || o.unsure(whole(2)) || o.unsure(whole(0)) {
		t.Error("an unidentified GPU is none of those that answer")
	}
	s = s.Read(cfg, now, gpu.NoDriver(gpu.DriverFailed, "lost"))
	if o := localDevicesOf(s); len(o.at) != 2 || !o.unsure(whole(2)) {
		t.Errorf("without a driver: %v", o.at)
	}
}

func TestFormat(t *testing.T) {
	e := agentFile{agent: "k8s-gpu", boot: "b00t", started: now, devices: normalized([]device{
		{instance(1, 2), 4, now}, {whole(1), 3, now}, {whole(0), 1, now}, {whole(0), 2, now},
		{gpu.Placement{GPU: "MIG-x", GI: 0, CI: gpu.Whole}, 7, now},
	})}
	text, err := e.encode()
	check.NoError(t, err)
	back, err := decode(text, "k8s-gpu")
	if err != nil || back.boot != e.boot || !back.started.Equal(now) || !slices.Equal(back.devices, e.devices) || len(back.devices) != 4 {
		t.Errorf("%v\n%s\n%+v", err, text, back)
	}
	for name, text := range map[string]string{
		"empty":          "",
		"cut short":      string(text[:len(text)/2]),
		"a later one":    `{"version": 3, "agent": "k8s-gpu"}`,
		"no version":     `{"agent": "k8s-gpu"}`,
		"another's":      `{"version": 2, "agent": "nomad-gpu"}`,
		"no GPU":         `{"version": 2, "agent": "k8s-gpu", "devices": [{"order": 1}]}`,
		"not a name":     `{"version": 2, "agent": "k8s-gpu", "devices": [{"gpu": "a\nb", "order": 1}]}`,
		"part of none":   `{"version": 2, "agent": "k8s-gpu", "devices": [{"gpu": "GPU-1", "ci": 1, "order": 1}]}`,
		"order too late": `{"version": 2, "agent": "k8s-gpu", "devices": [{"gpu": "GPU-1", "order": 9007199254740993}]}`,
		"too many":       `{"version": 2, "agent": "k8s-gpu", "devices": [{}` + strings.Repeat(",{}", maxDevices) + `]}`,
	} {
		if _, err := decode([]byte(text), "k8s-gpu"); err == nil {
			t.Errorf("%s was read", name)
		}
	}
}

// Any file is refused, or means the same when it is written again and can be used by nextDevices.
func FuzzDecode(f *testing.F) {
	text, _ := recorded("k8s-gpu", 3, whole(0), instance(1, 2)).encode()
	f.Add(text)
	f.Add([]byte(`{"version": 2, "agent": "k8s-gpu", "devices": [{"gpu": "GPU-1", "gi": 4294967295, "ci": 0, "order": 1}]}`))
	f.Add([]byte(`{"version": 2, "agent": "k8s-gpu", "devices": null}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		e, err := decode(text, "k8s-gpu")
		if err != nil {
			return
		}
		again, err := e.encode()
		if err != nil {
			return // a time before the year 0, which an agent never writes
		}
		back, err := decode(again, "k8s-gpu")
		if err != nil || !slices.Equal(placements(back.devices), placements(e.devices)) {
			t.Fatalf("%v: %s became %s", err, text, again)
		}
		others := []agentFile{recorded("nomad-gpu", 2, whole(0), whole(1))}
		for _, c := range nextDevices(e, others, want(whole(0), instance(1, 2)), true, now) {
			if recordedBefore(c, "k8s-gpu", others) {
				t.Fatalf("%v was recorded by another agent before", c)
			}
		}
	})
}
