package docs

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	fleetconfig "github.com/tandem-gpu/tandem/internal/fleet/config"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/docs/stage"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

var (
	// sections are the keys at the top of our configuration file.
	sections = []string{"version", "flags", "sharing", "policy", "memoryLimits", "prove", "reset", "resources", "health", "imex"}
	// fragments are parts of manifests that documents show: the keys of a container and a pod.
	fragments = []string{"env", "volumeMounts", "volumes"}
	// prometheus are keys of Prometheus' configuration, which promtool checks elsewhere: test/metrics, deploy/monitoring.
	prometheus = []string{"scrape_configs", "rule_files"}
	// offers is the first line of an example: the simulated machine, and the number of units of each resource there.
	offers = regexp.MustCompile(`^# ([a-z0-9-]+): (.*)\n`)
)

// Every YAML block is a configuration that both agents accept, with the resources that its first line names, or a manifest.
func TestExamples(t *testing.T) {
	bin := filepath.Dir(binaries.Path(t, "k8s-gpu"))
	stages := map[string]*stage.Stage{}
	tried := 0
	for _, d := range documents(t) {
		for _, b := range d.Blocks {
			if b.Language != "yaml" || generated(d.Path) {
				continue
			}
			at := fmt.Sprintf("%s:%d", d.Path, b.Line)
			var content map[string]any
			if err := yaml.Unmarshal([]byte(b.Text), &content); err != nil {
				t.Errorf("%s: %v", at, err)
				continue
			}
			keys := slices.Sorted(maps.Keys(content))
			switch {
			case subset(keys, sections):
				machine, want := "h100x8", ""
				if m := offers.FindStringSubmatch(b.Text); m != nil && slices.Contains(simdriver.Names(), m[1]) {
					machine, want = m[1], m[2]
					tried++
				}
				if stages[machine] == nil {
					s, err := stage.New(t.Context(), coretest.ShortDir(t), bin, machine)
					must(t, err)
					stages[machine] = s
				}
				example(t, stages[machine], at, b.Text, want)
			case content["clusters"] != nil: // of gpu-fleet
				if _, err := fleetconfig.Parse(at, []byte(b.Text)); err != nil {
					t.Errorf("%s: %v", at, err)
				}
			case content["kind"] != nil:
				meta, _ := content["metadata"].(map[string]any)
				if content["apiVersion"] == nil || meta["name"] == nil {
					t.Errorf("%s: a manifest needs apiVersion, kind and metadata.name", at)
				}
			case strings.HasPrefix(d.Path, "deploy/") && subset(keys, chartValues): // test/chart renders them
			case subset(keys, []string{"config"}): // values of the chart
				var values struct {
					Config struct{ Map map[string]any }
				}
				must(t, yaml.Unmarshal([]byte(b.Text), &values))
				for name, c := range values.Config.Map {
					text, err := yaml.Marshal(c)
					must(t, err)
					example(t, stages["h100x8"], at+" "+name, string(text), "")
				}
			case !subset(keys, fragments) && !subset(keys, prometheus):
				t.Errorf("%s: keys %q: neither a configuration nor a manifest", at, keys)
			}
		}
	}
	if tried < 5 {
		t.Errorf("only %d examples name what they offer", tried)
	}
}

// chartValues are the values in the examples of the charts.
var chartValues = []string{"config", "pools", "image", "imagePullSecrets", "secrets", "tokenSecret"}

func subset(keys, of []string) bool {
	return len(keys) > 0 && !slices.ContainsFunc(keys, func(k string) bool { return !slices.Contains(of, k) })
}

// example validates a file for both agents, and compares what k8s-gpu offers with it: "gpu 6, gpu.shared 16".
func example(t *testing.T, s *stage.Stage, at, text, want string) {
	t.Helper()
	const file = "/etc/tandem/example.yaml"
	must(t, os.WriteFile(s.Dir+file, []byte(text), 0o600))
	for _, command := range []string{"k8s-gpu --mps-root=/run/nvidia/mps validate " + file, "nomad-gpu validate " + file} {
		if r, err := s.Run(t.Context(), command); err != nil || r.Code != 0 {
			t.Errorf("%s: %s: %v, exit code %d\n%s", at, command, err, r.Code, r.Output)
		}
	}
	if want == "" {
		return
	}
	r, err := s.Run(t.Context(), "k8s-gpu --config-file="+file+" inspect --json")
	must(t, err)
	var report struct {
		Devices []struct {
			Pool     string
			Replicas int
		}
	}
	if err := json.Unmarshal([]byte(r.Output), &report); err != nil {
		t.Errorf("%s: %v\n%s", at, err, r.Output)
		return
	}
	units := map[string]int{}
	for _, d := range report.Devices {
		units[d.Pool] += max(d.Replicas, 1)
	}
	var got []string
	for _, pool := range slices.Sorted(maps.Keys(units)) {
		got = append(got, fmt.Sprintf("%s %d", pool, units[pool]))
	}
	if text := strings.Join(got, ", "); text != want {
		t.Errorf("%s offers %s, but the first line names %s", at, text, want)
	}
}
