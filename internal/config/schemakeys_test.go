package config

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/test/check"
)

// around is a file that is valid without the key that stands for $, for each object of package policy.
var around = map[string]string{
	"policy":                          "policy: {$}\n",
	"policy.include[]":                "policy: {include: [{model: x, $}]}\n",
	"policy.rules[]":                  "flags: {mpsRoot: /mps}\npolicy: {rules: [{select: {model: x}, use: mps, replicas: 2, $}]}\n",
	"policy.include[].memory":         "policy: {include: [{memory: {$}}]}\n",
	"sharing":                         "sharing: {$}\n",
	"sharing.timeSlicing":             "sharing: {timeSlicing: {$}}\n",
	"sharing.mps":                     "flags: {mpsRoot: /mps}\nsharing: {mps: {$}}\n",
	"sharing.timeSlicing.resources[]": "resources: {gpus: [{pattern: y, name: y}]}\nsharing: {timeSlicing: {resources: [{name: gpu, replicas: 2, rename: z, $}]}}\n",
	"sharing.mps.resources[]":         "flags: {mpsRoot: /mps}\nsharing: {mps: {resources: [{name: gpu, replicas: 2, rename: z, $}]}}\n",
	"resources":                       "resources: {$}\n",
	"resources.gpus[]":                "resources: {gpus: [{pattern: x, name: y, $}]}\n",
	"resources.mig[]":                 "resources: {mig: [{pattern: x, name: y, $}]}\n",
	"prove":                           "prove: {command: [/x], $}\n",
	"prove.windows[]":                 "prove: {command: [/x], windows: [{from: \"01:00\", to: \"02:00\", $}]}\n",
	"memoryLimits":                    "memoryLimits: {experimental: true, $}\n",
	"reset":                           "reset: {mode: act, $}\n",
	"reset.pause":                     "reset: {pause: {programs: [a], command: [/x], resume: [/y], $}}\n",
}

// given are the keys of the files above, which give way to the key that is tested.
var given = []string{"model: x, ", "use: exclusive, ", "use: mps, ", "replicas: 2, ", "name: gpu, ", "rename: z, ", "pattern: x, ", "name: y, ", "select: {model: x}, ", "command: [/x], ", "programs: [a], ", "resume: [/y], ", "mode: act, ", "experimental: true, ",
	"from: \"01:00\", ", "to: \"02:00\", "}

// with is the file with a key.
func with(file, key, value string) string {
	for _, g := range given {
		if strings.HasPrefix(g, key+": ") {
			file = strings.Replace(file, g, "", 1)
		}
	}
	return strings.Replace(file, "$", key+": "+value, 1)
}

// otherSpelling finds numbers and bools that a YAML reader takes for the usual spelling of the same value, which the reader here refuses.
var otherSpelling = regexp.MustCompile(`[ [](02|1e3|TRUE)\b`)

// The schema allows exactly the values that the reader accepts, whatever the key: values of its type, at its
// limits and beyond them, of other types, quoted and not.
func TestSchemaOfEachKey(t *testing.T) {
	s := fileSchema(t)
	checked := 0
	check := func(file string) {
		t.Helper()
		value, err := jsonValue(file)
		check.NoError(t, err)
		problem := s.Validate(value)
		f, err := parseFile("/c.yaml", []byte(file), policy.Kubernetes, fileKinds(true))
		if err == nil {
			_, err = resolve(NewFlags(KubernetesSpecs()), environment(nil), f)
		}
		if checked++; (err == nil) != (problem == nil) && (problem != nil || structural(err) && !otherSpelling.MatchString(file)) {
			t.Errorf("%s\nthe reader: %v\nthe schema: %v", file, err, problem)
		}
	}
	for _, o := range KubernetesSpecs() {
		if o.Key == "" {
			continue
		}
		for _, value := range valuesFor(o.Type) {
			check(nested(o.Key, " "+value))
		}
	}
	seen := map[string]bool{} // by Type.Name
	var walk func(path string, keys []schema.Key)
	walk = func(path string, keys []schema.Key) {
		file, ok := around[path]
		if !ok {
			t.Fatalf("no file around %s", path)
		}
		for _, k := range keys {
			for _, value := range valuesFor(k.Type) {
				check(with(file, k.Name, value))
			}
			at, of := path+"."+k.Name, k.Type
			if of.Kind == schema.List {
				at, of = at+"[]", *of.Item
			}
			if of.Kind == schema.Object && !seen[of.Name] {
				seen[of.Name] = of.Name != ""
				walk(at, of.Keys)
			}
		}
	}
	for _, k := range policy.Sections() {
		walk(k.Name, k.Keys)
	}
	if t.Logf("%d files", checked); checked < 2000 {
		t.Errorf("only %d files", checked)
	}
}

// valuesFor are values of any type, those of a type, and these in lists.
func valuesFor(of schema.Type) []string {
	scalars := []string{
		`""`, `" "`, "x", "x y", "y", `"*"`, "true", `"true"`, "TRUE", "yes", "f", "-1", "0", "1", "2", `"2"`, "02", "3.5", "1e3", "48", "49", "100", "101", "1000", "1001",
		"/x", "x/", "a.b/", "0s", "1", "10s", "1h0m", "-1s", "1.5h", "40GiB", "40 GiB", "40GB", "GiB", "GPU-1", "MIG-1/2", "GPU-*", "0:1", "0-1", "255", "256", `"-"`,
		"0000:3b:00.0", "3b:0", "3B:1f.7", "all", "auto", `"auto,x"`, "nvidia.com/x", "amd.com/x", "nvidia.com/", strings.Repeat("n", 52), strings.Repeat("n", 53),
		"/x y", "300s", "24h", "9000h", `"00:00"`, `"01:00"`, `"23:59"`, `"24:00"`, "mon",
		"63=ignore", `"63=ignore, 94 = degraded"`, "63=fine", "0=ignore", "v1", "v2",
	}
	values := []string{"~", "[]", "{}", "[[]]", "[~]", "[0, 0]", "[x, 0]", "{63: ignore}", "{63: fine}", "{0: ignore}", "{x: ignore}", "{63: [ignore]}", "{min: 1GiB}", "{mni: 1GiB}", "[{}]"}
	for _, v := range of.Values {
		scalars = append(scalars, v, v+"x", `"`+v+","+v+`"`)
		values = append(values, "["+v+", "+v+"]", "["+v+", x]")
	}
	for _, o := range of.Or {
		scalars = append(scalars, o.Values...)
		if o.Item != nil {
			scalars = append(scalars, o.Item.Values...)
		}
	}
	for _, v := range scalars {
		values = append(values, v, "["+v+"]")
	}
	slices.Sort(values)
	return slices.Compact(values)
}
