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
)

var now = time.Date(2026, 11, 21, 18, 0, 0, 0, time.UTC)

func whole(n int) gpu.Placement { return gpu.WholeGPU(coretest.GPU(n)) }

func instance(n int, gi uint32) gpu.Placement {
	return gpu.Placement{GPU: coretest.GPU(n), GI: gi, CI: 0}
}

// want is an offer of a node where every GPU was read.
func want(at ...gpu.Placement) offer {
	return offer{at: sortedPlacements(at), unsure: func(gpu.Placement) bool { return false }, ready: true}
}

func claimed(agent string, turn uint64, at ...gpu.Placement) claimFile {
	e := claimFile{agent: agent}
	for _, p := range at {
		e.claims = append(e.claims, claim{at: p, turn: turn, since: now})
	}
	return e
}

// unreadFile is the file of an agent that can't be used.
func unreadFile(agent string) claimFile {
	return claimFile{agent: agent, unknown: func(gpu.DeviceID) bool { return true }}
}

func placements(claims []claim) (at []gpu.Placement) {
	for _, c := range claims {
		at = append(at, c.at)
	}
	return at
}

func TestNextClaims(t *testing.T) {
	nomad := claimed("nomad-gpu", 5, whole(0), whole(1))
	for _, tc := range []struct {
		name   string
		mine   claimFile
		others []claimFile
		offer  offer
		refuse bool
		want   []claim
	}{
		{"no other agent", claimed("k8s-gpu", 0), nil, want(whole(0)), true, []claim{{whole(0), 1, now}}},
		{"warn: both", claimed("k8s-gpu", 0), []claimFile{nomad}, want(whole(1), whole(2)), false, []claim{{whole(1), 6, now}, {whole(2), 6, now}}},
		{"refuse: the other was first", claimed("k8s-gpu", 0), []claimFile{nomad}, want(whole(1), whole(2)), true, []claim{{whole(2), 6, now}}},
		{"refuse: we were first", claimed("k8s-gpu", 2, whole(1)), []claimFile{nomad}, want(whole(1)), true, []claim{{whole(1), 2, now}}},
		{"no longer offered", claimed("k8s-gpu", 2, whole(1), whole(2)), nil, want(whole(2)), true, []claim{{whole(2), 2, now}}},
		{"partitioned: the instances were claimed with the GPU", claimed("k8s-gpu", 2, whole(0)), []claimFile{nomad},
			want(instance(0, 1), instance(0, 2)), true, []claim{{instance(0, 1), 2, now}, {instance(0, 2), 2, now}}},
		{"MIG disabled: the GPU is more than was claimed", claimed("k8s-gpu", 2, instance(0, 1)), []claimFile{nomad}, want(whole(0)), true, nil},
		{"two instances are not the same hardware", claimed("k8s-gpu", 0), []claimFile{claimed("nomad-gpu", 1, instance(0, 1))},
			want(instance(0, 2)), true, []claim{{instance(0, 2), 2, now}}},
		{"equal turns: by name", claimed("k8s-gpu", 5, whole(1)), []claimFile{nomad}, want(whole(1)), true, []claim{{whole(1), 5, now}}},
		{"equal turns: the other's name is less", claimed("z", 5, whole(1)), []claimFile{nomad}, want(whole(1)), true, nil},
		{"refuse: the other may have claimed what we have not", claimed("k8s-gpu", 2, whole(1)), []claimFile{unreadFile("nomad-gpu")},
			want(whole(1), whole(2)), true, []claim{{whole(1), 2, now}}},
		{"warn: the other may have claimed it", claimed("k8s-gpu", 2, whole(1)), []claimFile{unreadFile("nomad-gpu")},
			want(whole(1), whole(2)), false, []claim{{whole(1), 2, now}, {whole(2), 3, now}}},
		{"unreadable: the claim stays", claimed("k8s-gpu", 2, whole(3)), nil,
			offer{unsure: func(gpu.Placement) bool { return true }}, true, []claim{{whole(3), 2, now}}},
		{"the highest turn", claimed("k8s-gpu", maxTurns, whole(3)), nil, want(whole(3), whole(4)), true,
			[]claim{{whole(3), maxTurns, now}, {whole(4), maxTurns, now}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			others := slices.Clone(tc.others)
			if got := nextClaims(tc.mine, others, tc.offer, tc.refuse, now); !slices.Equal(got, tc.want) {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		})
	}
}

// The core decides as the claims do: exactly the devices that this agent claims take work.
func TestCoreAndClaimsAgree(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 1))
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	state := core.NewState(cfg).Read(cfg, now, coretest.GPUs(8))
	for range 2000 {
		mine, other := claimFile{agent: "k8s-gpu"}, claimFile{agent: "nomad-gpu"}
		for n := range 8 {
			if random.IntN(2) == 0 {
				mine.claims = append(mine.claims, claim{at: whole(n), turn: random.Uint64N(4)})
			}
			switch random.IntN(3) {
			case 0:
				other.claims = append(other.claims, claim{at: whole(n), turn: random.Uint64N(4)})
			case 1:
				other.claims = append(other.claims, claim{at: instance(n, 3), turn: random.Uint64N(4)})
			}
		}
		o := offerOf(state.Inventory)
		mine.claims = nextClaims(mine, []claimFile{other}, o, true, now)
		host := inventory.Host{Claims: coreClaims(mine, []claimFile{other}, o)}
		for _, own := range []inventory.OwnClaims{{}, {Else: elseUnclaimed, At: placements(mine.claims)}} {
			host.Own = own
			for u := range state.WithHost(cfg, now, host).Inventory.Units() {
				if ours := mine.oldestClaim(u.Device.At) != nil; ours != u.Health.Schedulable() {
					t.Fatalf("%v: claimed %v, health %v\nmine %v\nother %v", u.Device.At, ours, u.Health, mine.claims, other.claims)
				}
			}
		}
	}
}

// Hardware that an agent reads for the first time belongs to the other one that claims it, without a further update.
func TestNewHardwareBelongsToTheOther(t *testing.T) {
	claims := coreClaims(claimed("k8s-gpu", 1, whole(0)), []claimFile{claimed("nomad-gpu", 2, whole(0), whole(5))}, want(whole(0)))
	cfg := core.DefaultConfig()
	cfg.Overlap = inventory.OverlapRefuse
	state := core.NewState(cfg).WithHost(cfg, now, inventory.Host{Claims: claims}).Read(cfg, now, coretest.GPUs(8))
	for u := range state.Inventory.Units() {
		if want := u.Device.At != whole(5); u.Health.Schedulable() != want {
			t.Errorf("%v: %v", u.Device.At, u.Health)
		}
	}
	if c := state.Inventory.Overlaps(); len(c) != 2 {
		t.Errorf("overlaps: %v", c)
	}
}

func TestOffer(t *testing.T) {
	cfg := core.DefaultConfig()
	cfg.Exclude = []gpu.DeviceID{coretest.GPU(2)}
	cfg.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: 4}}}
	s := core.NewState(cfg)
	if o := offerOf(s.Inventory); len(o.at) != 0 || !o.unsure(whole(0)) {
		t.Errorf("before the first reading: %v", o.at)
	}
	reading := coretest.GPUs(3)
	s = s.Read(cfg, now, reading)
	o := offerOf(s.Inventory)
	if !slices.Equal(o.at, []gpu.Placement{whole(0), whole(1)}) || o.unsure(whole(2)) || o.unsure(whole(7)) {
		t.Errorf("offered: %v", o.at)
	}
	reading.Excluded = []gpu.Exclusion{{Index: 7, At: whole(7), Failure: gpu.FailureError, Reason: "Unknown Error"}}
	if o := offerOf(core.NewState(cfg).Read(cfg, now, reading).Inventory); !o.unsure(whole(7)) || o.unsure(whole(2)) || o.unsure(whole(6)) {
		t.Error("a GPU that can't be read stays claimed, an excluded one does not")
	}
	reading.Excluded = []gpu.Exclusion{{Index: 7, Failure: gpu.FailureError, Reason: "Unknown Error"}}
	if o := offerOf(core.NewState(cfg).Read(cfg, now, reading).Inventory); !o.unsure(whole(7)) || o.unsure(whole(2)) || o.unsure(whole(0)) {
		t.Error("an unidentified GPU is none of those that answer")
	}
	s = s.Read(cfg, now, gpu.NoDriver(gpu.DriverFailed, "lost"))
	if o := offerOf(s.Inventory); len(o.at) != 2 || !o.unsure(whole(2)) {
		t.Errorf("without a driver: %v", o.at)
	}
}

func TestFormat(t *testing.T) {
	e := claimFile{agent: "k8s-gpu", boot: "b00t", started: now, claims: normalized([]claim{
		{instance(1, 2), 4, now}, {whole(1), 3, now}, {whole(0), 1, now}, {whole(0), 2, now},
		{gpu.Placement{GPU: "MIG-x", GI: 0, CI: gpu.Whole}, 7, now},
	})}
	text, err := e.encode()
	if err != nil {
		t.Fatal(err)
	}
	back, err := decode(text, "k8s-gpu")
	if err != nil || back.boot != e.boot || !back.started.Equal(now) || !slices.Equal(back.claims, e.claims) || len(back.claims) != 4 {
		t.Errorf("%v\n%s\n%+v", err, text, back)
	}
	for name, text := range map[string]string{
		"empty":         "",
		"cut short":     string(text[:len(text)/2]),
		"a later one":   `{"version": 2, "agent": "k8s-gpu"}`,
		"no version":    `{"agent": "k8s-gpu"}`,
		"another's":     `{"version": 1, "agent": "nomad-gpu"}`,
		"no GPU":        `{"version": 1, "agent": "k8s-gpu", "claims": [{"turn": 1}]}`,
		"not a name":    `{"version": 1, "agent": "k8s-gpu", "claims": [{"gpu": "a\nb", "turn": 1}]}`,
		"part of none":  `{"version": 1, "agent": "k8s-gpu", "claims": [{"gpu": "GPU-1", "ci": 1, "turn": 1}]}`,
		"turn too late": `{"version": 1, "agent": "k8s-gpu", "claims": [{"gpu": "GPU-1", "turn": 9007199254740993}]}`,
		"too many":      `{"version": 1, "agent": "k8s-gpu", "claims": [{}` + strings.Repeat(",{}", maxClaims) + `]}`,
	} {
		if _, err := decode([]byte(text), "k8s-gpu"); err == nil {
			t.Errorf("%s was read", name)
		}
	}
}

// Any file is refused, or means the same when it is written again and can be used by nextClaims.
func FuzzDecode(f *testing.F) {
	text, _ := claimed("k8s-gpu", 3, whole(0), instance(1, 2)).encode()
	f.Add(text)
	f.Add([]byte(`{"version": 1, "agent": "k8s-gpu", "claims": [{"gpu": "GPU-1", "gi": 4294967295, "ci": 0, "turn": 1}]}`))
	f.Add([]byte(`{"version": 1, "agent": "k8s-gpu", "claims": null}`))
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
		if err != nil || !slices.Equal(placements(back.claims), placements(e.claims)) {
			t.Fatalf("%v: %s became %s", err, text, again)
		}
		others := []claimFile{claimed("nomad-gpu", 2, whole(0), whole(1))}
		for _, c := range nextClaims(e, others, want(whole(0), instance(1, 2)), true, now) {
			if claimedBefore(c, "k8s-gpu", others) {
				t.Fatalf("%v was claimed by another agent before", c)
			}
		}
	})
}
