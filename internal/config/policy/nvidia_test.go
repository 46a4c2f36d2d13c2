package policy_test

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

// The examples of this project's documents are valid.
func TestOwnExamples(t *testing.T) {
	documentation, err := os.ReadFile("../../../docs/policy.md")
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile("../../../deploy/policy/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	given, shown, ok := strings.Cut(string(file), "\n# policy:\n") // what is only shown is a comment
	if !ok {
		t.Error("deploy/policy/policy.yaml shows no policy")
	}
	examples := []string{string(file), given + "\npolicy:\n" + strings.ReplaceAll("\n"+shown, "\n# ", "\n")}
	for _, part := range strings.Split(string(documentation), "```yaml\n")[1:] {
		example, _, _ := strings.Cut(part, "```")
		examples = append(examples, example)
	}
	for i, example := range examples {
		for _, to := range []policy.Orchestrator{policy.Nomad, policy.Kubernetes} {
			r, err := read(t, example, to)
			if err != nil {
				t.Errorf("%v\n%s", err, example)
			}
			if i == 1 && len(r.Policy.Rules) != 4 {
				t.Errorf("%d rules in the comment of deploy/policy/policy.yaml, want 4", len(r.Policy.Rules))
			}
		}
	}
}

// The examples in the README of NVIDIA's k8s-device-plugin (v0.17) and in the documentation of the GPU operator are
// taken as they are, and offer what they say there. In testdata/nvidia.golden a file stands with what it makes of
// eight GPUs, and with what it makes of one GPU beside one that is cut up.
func TestIncumbentsExamples(t *testing.T) {
	const path = "testdata/nvidia.golden"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	eight := coretest.GPUs(8)
	cut := coretest.WithMIG(coretest.GPUs(2), 1, "1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb")
	var got strings.Builder
	for example := range strings.SplitSeq(strings.TrimPrefix(string(text), "# "), "\n# ") {
		name, rest, _ := strings.Cut(example, "\n")
		file, _, _ := strings.Cut(rest, "=> ")
		got.WriteString("# " + name + "\n" + strings.TrimRight(file, "\n") + "\n")
		r, err := read(t, file, policy.Kubernetes)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		c := core.DefaultConfig()
		c.Policy = r.Policy
		if r.MIG != "" {
			c.MIG = r.MIG
		}
		got.WriteString("=> eight GPUs\n" + strings.Join(offered(c, eight), "\n") + "\n")
		got.WriteString("=> GPU 0 and four instances of GPU 1\n" + strings.Join(offered(c, cut), "\n") + "\n")
	}
	if diff := cmp.Diff(string(text), got.String()); diff != "" {
		t.Error(diff)
	}
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(path, []byte(got.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
