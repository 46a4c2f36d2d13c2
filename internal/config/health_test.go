package config

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/test/check"
)

// defaults has the default of each setting of health.
func defaults() Nomad { return Nomad{Core: core.DefaultConfig(), Health: DefaultHealth()} }

// The documented default of each key is the default.
func TestHealthDefaults(t *testing.T) {
	got := defaults()
	for _, o := range healthOptions(&got.Core, &got.Health) {
		check.NoError(t, o.set(Value{Text: o.Default}))
	}
	if diff := cmp.Diff(defaults(), got); diff != "" {
		t.Errorf("the defaults as texts differ: %s", diff)
	}
	check.NoError(t, got.Core.Validate())
}

func TestXIDsInTheFile(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		want map[uint64]xid.Effect
		err  string
	}{
		"mapping": {file: "health:\n  xids:\n    63: ignore\n    999: unhealthy\n", want: map[uint64]xid.Effect{63: xid.None, 999: xid.Withdraws}},
		"text":    {file: "health: {xids: '63=ignore, 94=degraded'}", want: map[uint64]xid.Effect{63: xid.None, 94: xid.Degrades}},
		"anchors": {file: "health:\n  xids: {63: &i ignore, 64: *i}\n", want: map[uint64]xid.Effect{63: xid.None, 64: xid.None}},
		"none":    {file: "health:\n  xids:\n"},
		"empty":   {file: "health: {xids: {}}"},
		"effect": {file: "health:\n  healthMode: enforce\n  xids: {48: degraded, 63: fine}\n",
			err: `c.yaml:3: health.xids = "48=degraded,63=fine": "63=fine": want an XID and its effect, such as 63=ignore: degraded, ignore or unhealthy`},
		"twice":  {file: "health: {xids: {63: ignore, 63: ignore}}", err: `c.yaml:1: health.xids = "63=ignore,63=ignore": XID 63 is given twice`},
		"list":   {file: "health: {xids: [63, 64]}", err: `c.yaml:1: health.xids = "[...]": want a mapping`},
		"nested": {file: "health: {xids: {63: {a: b}}}", err: `c.yaml:1: health.xids.63 = "{...}": want a single value`},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolveAll(t, nil, nil, c.file)
			if text := errorText(err); text != c.err {
				t.Fatalf("error %q, want %q", text, c.err)
			}
			if diff := cmp.Diff(c.want, s.Core.Health.XIDs, cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// What the variables of NVIDIA's plugin make of the rules.
func TestHealthCheckVariables(t *testing.T) {
	type effects = map[uint64]xid.Effect
	for name, c := range map[string]struct {
		disable, enable, xids string
		mode                  health.Mode // "" = enforce
		all                   *xid.Effect
		want                  effects
		err                   string
	}{
		"unset":                      {},
		"ignore two":                 {disable: "48, 79", want: effects{48: xid.None, 79: xid.None}},
		"count two":                  {enable: "13,,109,", want: effects{13: xid.Withdraws, 109: xid.Withdraws}},
		"counting wins":              {disable: "13,48", enable: "13", want: effects{13: xid.Withdraws, 48: xid.None}},
		"ignore all":                 {disable: "all", mode: health.ModeOff},
		"ignore all, as it was once": {disable: "XIDS", mode: health.ModeOff},
		"all anywhere":               {disable: "48,all", mode: health.ModeOff, want: effects{48: xid.None}},
		"all but some":               {disable: "all", enable: "79,48", all: new(xid.None), want: effects{48: xid.Withdraws, 79: xid.Withdraws}},
		"count all":                  {enable: "ALL", all: new(xid.Withdraws)},
		"count all but none":         {disable: "48", enable: "13,all", all: new(xid.Withdraws)},
		"both all":                   {disable: "all", enable: "all", all: new(xid.Withdraws)},
		"--xids wins":                {disable: "48,79", enable: "13", xids: "79=degraded,13=ignore", want: effects{48: xid.None, 79: xid.Degrades, 13: xid.None}},
		"--xids beside all":          {enable: "all", xids: "13=ignore", all: new(xid.Withdraws), want: effects{13: xid.None}},
		"--xids is not all":          {disable: "all", xids: "79=unhealthy", mode: health.ModeOff, want: effects{79: xid.Withdraws}},
		"word":                       {disable: "48,xid", err: `DP_DISABLE_HEALTHCHECKS = "48,xid": want XIDs such as 48,79, or "all"`},
		"zero":                       {enable: "0", err: `DP_ENABLE_HEALTHCHECKS = "0": want XIDs such as 48,79, or "all"`},
		"negative":                   {enable: "-1", err: `DP_ENABLE_HEALTHCHECKS = "-1": want XIDs such as 48,79, or "all"`},
		"all and a word":             {disable: "all,x", err: `DP_DISABLE_HEALTHCHECKS = "all,x": want XIDs such as 48,79, or "all"`},
		"both wrong": {disable: "x,y", enable: "z", err: `DP_DISABLE_HEALTHCHECKS = "x,y": want XIDs such as 48,79, or "all"
DP_ENABLE_HEALTHCHECKS = "z": want XIDs such as 48,79, or "all"`},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolveAll(t, []string{"--xids=" + c.xids},
				map[string]string{disableHealthChecks: c.disable, enableHealthChecks: c.enable}, "")
			if text := errorText(err); text != c.err {
				t.Fatalf("error %q, want %q", text, c.err)
			}
			if err != nil {
				return
			}
			want := health.DefaultPolicy()
			if want.AllXIDs, want.XIDs = c.all, c.want; c.mode != "" {
				want.Mode = c.mode
			}
			if diff := cmp.Diff(want, s.Core.Health, cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
		})
	}
}
