package deviceclass_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceclass"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// parse returns the configuration of a file.
func parse(t *testing.T, text string) deviceclass.Configuration {
	t.Helper()
	f, err := config.ParseFile("nodes.yaml", []byte("version: v1\n"+text), policy.Kubernetes)
	if err != nil {
		t.Fatal(err)
	}
	return deviceclass.Configuration{MIG: f.MIG, Policy: f.Policy}
}

// The classes for the configurations of nodes, as documented: pools by name, shares, MIG profiles, several groups of nodes.
func TestClasses(t *testing.T) {
	const (
		single   = "flags: {migStrategy: single}\n"
		mixed    = "flags: {migStrategy: mixed}\n"
		training = "policy:\n  rules:\n  - {select: {index: 0}, name: training}\n"
		sharing  = "policy:\n  rules:\n  - {select: {index: 1}, use: mps, replicas: 2}\n  - {select: {model: \"*\"}, use: time-slicing, replicas: 4}\n"
		profile  = "policy:\n  rules:\n  - {select: {migProfile: 1g.10gb}, use: time-slicing, replicas: 4}\n  - {select: {migProfile: 3g.*}, name: Big_Ones}\n"
		reserved = "policy:\n  rules:\n  - {select: {index: 0}, use: reserved}\n"
		renamed  = "resources:\n  gpus:\n  - {pattern: \"*A100*\", name: a100}\nsharing:\n  timeSlicing:\n    renameByDefault: true\n    resources: [{name: nvidia.com/a100, replicas: 2}]\n"
		plain    = "sharing:\n  timeSlicing:\n    resources: [{name: nvidia.com/gpu, replicas: 2}]\n"
	)
	var b strings.Builder
	for _, tc := range []struct {
		about    string
		files    []string
		profiles []string
	}{
		{"nothing configured", []string{""}, nil},
		{"no files", nil, nil},
		{"MIG strategy single", []string{single}, nil},
		{"MIG strategy mixed, profiles not known", []string{mixed}, nil},
		{"MIG strategy mixed", []string{mixed}, []string{"3g.40gb", "1g.10gb+me", "3g.40gb"}},
		{"a pool of its own", []string{training}, nil},
		{"shared by default names", []string{sharing}, nil},
		{"MIG profiles in rules", []string{mixed + profile}, []string{"7g.80gb"}},
		{"reserved", []string{reserved}, nil},
		{"renamed shares of a named pool", []string{renamed}, nil},
		{"shares under the name nvidia.com/gpu", []string{plain}, nil},
		{"three groups of nodes", []string{training, single, renamed}, nil},
	} {
		var all []deviceclass.Configuration
		for _, text := range tc.files {
			all = append(all, parse(t, text))
		}
		classes, err := deviceclass.Of(all, deviceclass.Options{Profiles: tc.profiles, ExtendedResources: true})
		if err != nil {
			t.Errorf("%s: %v", tc.about, err)
		}
		fmt.Fprintf(&b, "%s:\n", tc.about)
		for _, c := range classes {
			fmt.Fprintf(&b, "  %s (%s) %s\n    %s\n", c.Name, c.About, c.ExtendedResource, c.Expression)
		}
		plain, err := deviceclass.Of(all, deviceclass.Options{Profiles: tc.profiles})
		if err != nil || len(plain) != len(classes) {
			t.Errorf("%s, without extended resources: %v, %v", tc.about, plain, err)
		}
		for _, c := range plain {
			if c.ExtendedResource != "" {
				t.Errorf("%s, without extended resources: %+v", tc.about, c)
			}
		}
	}
	goldenfile.Compare(t, "testdata/classes.golden", b.String())
}

// Pools whose classes would have one name, or that of a class of NVIDIA's driver, and names that are too long are errors with place,
// value and remedy, all at once.
func TestProblems(t *testing.T) {
	long := strings.Repeat("x", 52)
	c := parse(t, "policy:\n  rules:\n"+
		"  - {select: {index: 0}, name: big.one}\n  - {select: {index: 1}, name: big-one}\n"+
		"  - {select: {index: 2}, name: mig}\n  - {select: {index: 3}, name: vfio.gpu}\n  - {select: {index: 4}, name: "+long+"}\n")
	for i := range c.Policy.Rules {
		if r := &c.Policy.Rules[i]; r.Pool == long {
			r.Pool += ".mps.and.more"
		}
	}
	_, err := deviceclass.Of([]deviceclass.Configuration{c}, deviceclass.Options{})
	want := []string{
		`nodes.yaml:4: policy.rules[0] = "big.one": the name of its class would be big-one.nvidia.com, as that of pool big-one: give the pool another name`,
		`nodes.yaml:6: policy.rules[2] = "mig": the name of its class would be mig.nvidia.com, as that of a class of NVIDIA's driver: give the pool another name`,
		`nodes.yaml:8: policy.rules[4] = "` + long + `.mps.and.more": want 63 characters or less for an extended resource: 65 are too many`,
	}
	if err == nil || err.Error() != strings.Join(want, "\n") {
		t.Errorf("%v\nwant\n%s", err, strings.Join(want, "\n"))
	}
	if _, ok := errors.AsType[*setting.Error](err); !ok {
		t.Errorf("%T", err)
	}
}

// What is printed is a stream of documents that kubectl reads.
func TestPrint(t *testing.T) {
	classes, err := deviceclass.Of([]deviceclass.Configuration{parse(t, "policy:\n  rules:\n  - {select: {index: 0}, name: training}\n")}, deviceclass.Options{ExtendedResources: true})
	if err != nil {
		t.Fatal(err)
	}
	text, err := deviceclass.Print(classes)
	if err != nil {
		t.Fatal(err)
	}
	d := yaml.NewDecoder(strings.NewReader(string(text)))
	for _, c := range classes {
		var o struct {
			Kind     string
			Metadata struct{ Name string }
			Spec     struct {
				Selectors            []struct{ CEL struct{ Expression string } }
				ExtendedResourceName string `yaml:"extendedResourceName"`
			}
		}
		if err := d.Decode(&o); err != nil {
			t.Fatal(err)
		}
		if o.Metadata.Name != c.Name || len(o.Spec.Selectors) != 1 || o.Spec.Selectors[0].CEL.Expression != c.Expression || o.Spec.ExtendedResourceName != c.ExtendedResource {
			t.Errorf("%+v is printed as %+v", c, o)
		}
	}
	if !strings.Contains(string(text), "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\n") || !strings.HasPrefix(string(text), "# vfio.gpu.nvidia.com ") {
		t.Errorf("%s", text)
	}
}
