package policy_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// The examples of this project's documents are valid.
func TestOwnExamples(t *testing.T) {
	documentation, err := os.ReadFile("../../../docs/policy.md")
	check.NoError(t, err)
	file, err := os.ReadFile("../../../deploy/policy/policy.yaml")
	check.NoError(t, err)
	given, shown, ok := strings.Cut(string(file), "\n# policy:\n") // what is only shown is a comment
	if !ok {
		t.Error("deploy/policy/policy.yaml shows no policy")
	}
	examples := []string{string(file), given + "\npolicy:\n" + strings.ReplaceAll("\n"+shown, "\n# ", "\n")}
	for _, part := range strings.Split(string(documentation), "```yaml\n")[1:] {
		example, _, _ := strings.Cut(part, "```")
		if strings.HasPrefix(example, "# values.yaml") { // of the chart: test/docs validates the configurations in them
			continue
		}
		examples = append(examples, example)
	}
	for i, example := range examples {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			r, err := read(example, to)
			if err != nil {
				t.Errorf("%v\n%s", err, example)
			}
			if i == 1 && len(r.Policy.Rules) != 5 {
				t.Errorf("%d rules in the comment of deploy/policy/policy.yaml, want 5", len(r.Policy.Rules))
			}
		}
	}
}

// The examples in the README of NVIDIA's k8s-device-plugin (v0.17) and in the documentation of the GPU operator are
// valid as they are, and offer what is written there. testdata/nvidia.golden has each file with what it offers of
// eight GPUs, and of one GPU beside one in MIG mode.
func TestIncumbentsExamples(t *testing.T) {
	const path = "testdata/nvidia.golden"
	text, err := os.ReadFile(path)
	check.NoError(t, err)
	eight := coretest.GPUs(8)
	cut := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb")
	var got strings.Builder
	for example := range strings.SplitSeq(strings.TrimPrefix(string(text), "# "), "\n# ") {
		name, rest, _ := strings.Cut(example, "\n")
		file, _, _ := strings.Cut(rest, "=> ")
		got.WriteString("# " + name + "\n" + strings.TrimRight(file, "\n") + "\n")
		r, err := read(file, policy.Kubernetes)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		c := configOf(r)
		got.WriteString("=> eight GPUs\n" + strings.Join(offered(c, eight), "\n") + "\n")
		got.WriteString("=> GPU 0 and four instances of GPU 1\n" + strings.Join(offered(c, cut), "\n") + "\n")
	}
	goldenfile.Compare(t, path, got.String())
}

// BenchmarkCompile reads a file of rules, from its text to the policy. A configuration is read at a start and at a
// HUP, so what counts is that a large one takes no more than it is larger.
func BenchmarkCompile(b *testing.B) {
	for _, rules := range []int{10, 1000, 5000} {
		b.Run(fmt.Sprintf("%d rules", rules), func(b *testing.B) {
			var text strings.Builder
			text.WriteString("policy:\n  rules:\n")
			for i := range rules {
				fmt.Fprintf(&text, "    - {select: {uuid: GPU-%d}, use: time-slicing, replicas: 4, name: pool-%d}\n", i, i)
			}
			text.WriteString("sharing:\n  timeSlicing:\n    resources:\n")
			for i := range rules {
				fmt.Fprintf(&text, "      - {name: mig-%d, replicas: 2}\n", i)
			}
			for b.Loop() {
				if _, err := config.ParseFile("/c.yaml", []byte(text.String()), policy.Nomad); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
