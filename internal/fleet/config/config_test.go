package config_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const whole = `
clusters:
  - name: east
    kind: kubernetes
    mode: act
    kubeconfig: east.kubeconfig
    context: "east-1"
    controllers: [PyTorchJob.kubeflow.org, RayCluster.ray.io]
  - name: dc1
    kind: nomad
    mode: off
    address: https://nomad.example:4646
    region: global
    token_file: /run/dc1.token
    ca_file: ca.pem
    cert_file: cert.pem
    key_file: key.pem
ledger: {cluster: dc1, namespace: ops, name: nomad/jobs/rescue}
policy:
  ignore: [XID_48, NVLINK_DOWN, RECOVERY_ACTION_DRAIN_AND_RESET, EVENT_0x10, XID_99999]
  delay: 0s
  max_gpus: 2
  max_nodes: 3
  max_percent: 0
  cool_down: 2m
  attempts: 4
  quorum_nodes: 5
  quorum_time: 15m
  deadline: 24h
  preempt: true
  ineligible: true
listen: :9500
token_file: token
`

func TestEachKey(t *testing.T) {
	t.Parallel()
	c, err := config.Parse("/etc/f/f.yaml", []byte(whole))
	check.NoError(t, err)
	want := config.Config{
		Clusters: []config.ClusterConfig{
			{Name: "east", Kind: fleet.Kubernetes, Mode: rescue.ModeAct, Kubeconfig: "/etc/f/east.kubeconfig", Context: "east-1",
				Controllers: []string{"PyTorchJob.kubeflow.org", "RayCluster.ray.io"}},
			{Name: "dc1", Kind: fleet.Nomad, Mode: rescue.ModeOff, Address: "https://nomad.example:4646", Region: "global", TokenFile: "/run/dc1.token",
				CAFile: "/etc/f/ca.pem", CertFile: "/etc/f/cert.pem", KeyFile: "/etc/f/key.pem"},
		},
		Policy: rescue.Policy{
			Ignore: []string{"XID_48", "NVLINK_DOWN", "RECOVERY_ACTION_DRAIN_AND_RESET", "EVENT_0x10", "XID_99999"}, MaxGPUs: 2, MaxNodes: 3,
			CoolDown: 2 * time.Minute, Attempts: 4, QuorumNodes: 5, QuorumTime: 15 * time.Minute, Deadline: 24 * time.Hour, Preempt: true, Ineligible: true,
		},
		Ledger: config.Ledger{Cluster: "dc1", Namespace: "ops", Name: "nomad/jobs/rescue"},
		Listen: ":9500", TokenFile: "/etc/f/token",
	}
	checkConfig(t, c, want)
	if v := reflect.ValueOf(c.Policy); v.NumField() != 12 {
		t.Errorf("a policy has %d settings, and this test has 12", v.NumField())
	}
	if one, ok := c.LedgerCluster(); !ok || one.Name != "dc1" {
		t.Errorf("%+v has the ledger", one)
	}
	if unread, later := c.Unread(); len(unread) != 4 || len(later) != 2 || !strings.Contains(unread[0].Error(), `/etc/f/f.yaml:6: clusters[0].kubeconfig = "/etc/f/east.kubeconfig": want a file that can be read: open`) {
		t.Errorf("unread: %q, %q", unread, later)
	}
	goldenfile.Compare(t, "testdata/summary.golden", strings.Join(append(c.Summary(), ""), "\n"))
}

// checkConfig compares all that is exported.
func checkConfig(t *testing.T, got, want config.Config) {
	t.Helper()
	if a, b := fmt.Sprintf("%+v", exported(got)), fmt.Sprintf("%+v", exported(want)); a != b {
		t.Errorf("got\n%s, want\n%s", a, b)
	}
}

func exported(c config.Config) []any {
	return []any{c.Clusters, c.Policy, c.Ledger, c.Listen, c.TokenFile}
}

func TestDefaults(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]config.Ledger{
		``:                                       {File: "/var/lib/gpu-fleet/ledger.json"},
		`ledger: {cluster: k}`:                   {Cluster: "k", Namespace: "gpu-fleet", Name: "gpu-fleet"},
		`ledger: {cluster: n}`:                   {Cluster: "n", Namespace: "default", Name: "nomad/jobs/gpu-fleet"},
		`ledger: {file: l.json}`:                 {File: "/etc/l.json"},
		"ledger: {cluster: '', file: ~}\nlisten": {File: "/var/lib/gpu-fleet/ledger.json"},
	} {
		text, _ = strings.CutSuffix(text, "\nlisten")
		c, err := config.Parse("/etc/f.yaml", []byte("clusters: [{name: k, kind: kubernetes}, {name: n, kind: nomad, address: 'http://127.0.0.1:4646'}]\n"+text))
		check.NoError(t, err)
		checkConfig(t, c, config.Config{
			Clusters: []config.ClusterConfig{
				{Name: "k", Kind: fleet.Kubernetes, Mode: rescue.ModeReport}, {Name: "n", Kind: fleet.Nomad, Mode: rescue.ModeReport, Address: "http://127.0.0.1:4646"},
			},
			Policy: rescue.Default(), Ledger: want, Listen: "127.0.0.1:9410",
		})
		if unread, later := c.Unread(); unread != nil || later != nil {
			t.Error(unread, later)
		}
	}
}

// The texts with problems, each with what is printed of it. Those of shape are refused by the schema, too.
func TestProblems(t *testing.T) {
	t.Parallel()
	s := compiled(t)
	var out strings.Builder
	for _, name := range files(t) {
		text, err := os.ReadFile(name)
		check.NoError(t, err)
		base := filepath.Base(name)
		_, err = config.Parse(base, text)
		if err == nil {
			t.Errorf("%s has no problem", base)
		}
		fmt.Fprintf(&out, "%s\n%v\n\n", text, err)
		var value any
		if yaml.Unmarshal(text, &value) != nil {
			continue
		}
		if shape := strings.HasPrefix(base, "shape-"); shape && s.Validate(value) == nil {
			t.Errorf("the schema allows %s", base)
		}
	}
	goldenfile.Compare(t, "testdata/problems.golden", out.String())
}

func files(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(names) < 8 {
		t.Fatal(names, err)
	}
	slices.Sort(names)
	return names
}

// With problems, what is valid is there: "gpu-fleet stop" reaches the running process by it.
func TestPartOfInvalid(t *testing.T) {
	t.Parallel()
	c, err := config.Parse("/f.yaml", []byte("clusters: [{name: k, kind: x}]\nlisten: ':9500'\ntoken_file: /t\npolicy: {delay: never, max_gpus: 2}\n"))
	if err == nil || c.Listen != ":9500" || c.TokenFile != "/t" || c.Policy.Delay != time.Minute || c.Policy.MaxGPUs != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = config.Load("/nowhere/f.yaml")
	if !errors.Is(err, os.ErrNotExist) || c.Listen != config.DefaultListen || err.Error() != "configuration file: open /nowhere/f.yaml: no such file or directory: want one that can be read, by --config-file or GPU_FLEET_CONFIG_FILE" {
		t.Errorf("%+v, %v", c, err)
	}
}

// Each problem names key, value and remedy.
func FuzzParse(f *testing.F) {
	f.Add([]byte(whole))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := config.Parse("/f.yaml", text)
		if err == nil && (len(c.Clusters) == 0 || c.Policy.Check() != nil || c.Listen == "" || c.Ledger.Cluster == "" && c.Ledger.File == "") {
			t.Errorf("%q is %+v", text, c)
		}
		joined, ok := err.(interface{ Unwrap() []error })
		if !ok {
			return
		}
		for _, err := range joined.Unwrap() {
			if s, ok := errors.AsType[*setting.Error](err); ok && (s.Key == "" || s.Remedy == "" || strings.Contains(err.Error(), "\n")) {
				t.Errorf("%q has %q", text, err)
			}
		}
	})
}

func TestSchemaFile(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	check.NoError(t, config.WriteSchema(&text))
	goldenfile.Compare(t, "../../../docs/gpu-fleet.schema.json", text.String())
	var value any
	check.NoError(t, yaml.Unmarshal([]byte(whole), &value))
	check.NoError(t, compiled(t).Validate(value))
}

// The limits of numbers in the schema are those that are checked.
func TestLimits(t *testing.T) {
	t.Parallel()
	s := compiled(t)
	for key, limits := range map[string][2]int{"max_gpus": {1, 64}, "max_nodes": {1, 1000}, "max_percent": {0, 50}, "attempts": {1, 10}, "quorum_nodes": {1, 1000}} {
		for _, n := range []int{limits[0] - 1, limits[0], limits[1], limits[1] + 1} {
			text := fmt.Sprintf("clusters: [{name: dc1, kind: nomad, address: 'http://127.0.0.1:4646'}]\npolicy: {%s: %d}\n", key, n)
			var value any
			check.NoError(t, yaml.Unmarshal([]byte(text), &value))
			_, err := config.Parse("f.yaml", []byte(text))
			if want := n >= limits[0] && n <= limits[1]; (err == nil) != want || (s.Validate(value) == nil) != want {
				t.Errorf("%s = %d: %v; by the schema: %v", key, n, err, s.Validate(value))
			}
		}
	}
}

func compiled(t *testing.T) *jsonschema.Schema {
	t.Helper()
	var text bytes.Buffer
	check.NoError(t, config.WriteSchema(&text))
	document, err := jsonschema.UnmarshalJSON(&text)
	check.NoError(t, err)
	c := jsonschema.NewCompiler()
	check.NoError(t, c.AddResource("fleet.json", document))
	s, err := c.Compile("fleet.json")
	check.NoError(t, err)
	return s
}
