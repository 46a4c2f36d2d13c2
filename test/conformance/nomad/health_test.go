package nomad

import (
	"maps"
	"strings"
	"testing"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/nomad/nomad/structs/config"
)

// block is a config block as the agent reads it from its configuration.
func block(t *testing.T, text string) map[string]any {
	t.Helper()
	var agent struct {
		Plugins []*config.PluginConfig `hcl:"plugin"`
	}
	if err := hcl.Decode(&agent, `plugin "nomad-gpu" { config { `+text+` } }`); err != nil {
		t.Fatal(err)
	}
	return agent.Plugins[0].Config
}

// The keys of health, as one would write them into the agent's configuration.
func Test06HealthKeys(t *testing.T) {
	for name, tc := range map[string]struct {
		config string
		want   []string // in the agent's error; none = it starts
	}{
		"all": {`
			health_mode = "observe"
			xids = { "63" = "ignore", "999" = "unhealthy" }
			health_period = "5s"
			health_settle = "20s"
			call_deadline = "2m"
			recovery = "manual"
			recovery_dwell = "3m"
			recovery_checks = 4
			recovery_limit = 5
			degraded = "unhealthy"
			application_faults = "ignore"
			kernel_log = "off"
			state_dir = ""
			simulation = true`, nil},
		"XIDs as a block":     {`xids { "63" = "ignore" }`, nil},
		"no XIDs":             {`xids = {}`, nil},
		"XIDs as a text":      {`xids = "63=ignore"`, []string{`"xids" blocks`}},
		"a word for a number": {`recovery_checks = "some"`, []string{"recovery_checks"}},
		"a word for a bool":   {`simulation = "on"`, []string{"simulation"}},
		"misspelled key":      {`recovery_dwel = "1m"`, []string{"recovery_dwel"}},
		"all problems at once": {
			`health_mode = "strict"
			xids = { "63" = "fatal" }
			recovery_checks = 2.5
			kernel_log = "kmsg"`,
			[]string{`health_mode = "strict": want enforce, observe or off`, `xids = "63=fatal"`, `recovery_checks = "2.5": want a number`, `kernel_log = "kmsg"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			keys := machine("").config(nil)
			maps.Copy(keys, block(t, tc.config))
			a := newAgent(t, keys)
			if (a.load != nil) != (tc.want != nil) {
				t.Fatalf("loading: %v", a.load)
			}
			for _, want := range tc.want {
				if !strings.Contains(a.load.Error(), want) {
					t.Errorf("%q is not in: %v", want, a.load)
				}
			}
			a.end(t)
		})
	}
}

// The operator's overrides reach the verdict.
func Test10XIDOverrides(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, block(t, `xids = { "95" = "ignore", "999" = "unhealthy" }`))
	a.devices(t, 8, 8)
	m.ctl(t, "xid", "1", "95")
	m.ctl(t, "xid", "2", "999")
	for i, d := range instances(a.devices(t, 8, 7)) {
		if d.Healthy != (i != 2) {
			t.Errorf("%d: %+v", i, d)
		}
	}
}

// Nomad asks one node of a class whether it has the devices, and believes the others to be like it
// (scheduler/feasible, FeasibilityWrapper). A node whose GPUs are sick is of another class, and hides nobody.
func Test20SickNodeHidesNobody(t *testing.T) {
	sick, well := install(t, "t4"), install(t, "t4")
	a := startAgent(t, sick, nil)
	a.devices(t, 1, 1)
	sick.ctl(t, "lose", "0")
	one, other := node(a.devices(t, 1, 0)), node(startAgent(t, well, nil).devices(t, 1, 1))
	for range 64 { // in an order by chance
		if selected(t, job(ask("nvidia/gpu", 1)), one, other) == nil {
			t.Fatal("the GPU that is well was not found")
		}
	}
}
