//go:build !before1.37

package scheduling

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kubernetes/pkg/registry/resource/deviceclass"
	"k8s.io/kubernetes/pkg/registry/resource/resourceclaimtemplate"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

const repository = "../../../../"

// Each example of deploy/dra and of docs/dra.md is allocated on a node that has what it asks for, with the classes that are shipped.
func TestExamples(t *testing.T) {
	classes := classLister{}
	for _, text := range documents(t, readFile(t, "deploy/dra/classes.yaml"), "DeviceClass") {
		class, err := create(t, deviceclass.Strategy, text, &resourceapi.DeviceClass{})
		if err != nil {
			t.Fatal(err)
		}
		classes[class.Name] = class
	}
	sharing := config(rule(inventory.Rule{Sharing: timeSlicing(4)}, 4))
	classes["gpu-shared.nvidia.com"] = printedClasses(t, sharing)["gpu-shared.nvidia.com"]

	s := coretest.WithMIG(coretest.GPUs(6), 5, "1g.10gb", "3g.40gb")
	for i := range s.Devices {
		d := &s.Devices[i]
		d.Architecture, d.PCIeRoot = "Hopper", "pci0000:00"
		if d.Profile == "3g.40gb" {
			d.Memory = 40 << 30
		}
	}
	sick := health.Ledger{}.Apply(health.DefaultPolicy(), testStart, health.Observation{At: gpu.WholeGPU(coretest.GPU(0)), Kind: health.XID, Code: 95})
	examples, err := filepath.Glob(filepath.Join(repository, "deploy/dra/examples/*.yaml"))
	if err != nil || len(examples) < 8 {
		t.Fatal(examples, err)
	}
	for about, text := range claimsOf(t, examples) {
		var template struct {
			Spec struct{ Spec json.RawMessage }
		}
		if err := json.Unmarshal(text, &template); err != nil {
			t.Fatal(err)
		}
		if len(template.Spec.Spec) > 0 {
			if _, err := create(t, resourceclaimtemplate.NewStrategy(adminNamespaces.CoreV1().Namespaces()), inDefault(t, text), &resourceapi.ResourceClaimTemplate{}); err != nil {
				t.Errorf("%s: %v", about, err)
			}
		} else {
			var claim struct{ Spec json.RawMessage }
			if err := json.Unmarshal(text, &claim); err != nil {
				t.Fatal(err)
			}
			template.Spec.Spec = claim.Spec
		}
		for _, l := range []health.Ledger{{}, sick} {
			cl := newCluster(t, classes, publish(t, build(s, sharing, l)))
			results, err := cl.allocate(about, string(template.Spec.Spec))
			if got := found(cl, results, err); got == "none" || strings.HasPrefix(got, "error") {
				t.Errorf("%s: %s", about, got)
			}
		}
	}
}

// claimsOf returns the claims and templates of files, and those of docs/dra.md, as JSON.
func claimsOf(t *testing.T, files []string) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	add := func(about, text string) {
		for _, kind := range []string{"ResourceClaim", "ResourceClaimTemplate"} {
			for _, one := range documents(t, text, kind) {
				all[about] = one
			}
		}
	}
	for _, path := range files {
		add(filepath.Base(path), readFile(t, strings.TrimPrefix(path, repository)))
	}
	for i, block := range strings.Split(readFile(t, "docs/dra.md"), "```yaml\n")[1:] {
		text, _, _ := strings.Cut(block, "```")
		add("docs/dra.md "+string(rune('1'+i)), text)
	}
	if len(all) < 9 { // extended-resource.yaml has none
		t.Errorf("only %d claims", len(all))
	}
	return all
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// documents returns the documents of a kind in a YAML stream, as JSON.
func documents(t *testing.T, text, kind string) (all []json.RawMessage) {
	t.Helper()
	for d := yaml.NewYAMLToJSONDecoder(bytes.NewReader([]byte(text))); ; {
		var one json.RawMessage
		if err := d.Decode(&one); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		var object struct{ Kind string }
		if json.Unmarshal(one, &object) == nil && object.Kind == kind {
			all = append(all, one)
		}
	}
}

// inDefault returns an object in the namespace default, as kubectl sends it.
func inDefault(t *testing.T, text []byte) []byte {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	object["metadata"].(map[string]any)["namespace"] = "default"
	text, err := json.Marshal(object)
	if err != nil {
		t.Fatal(err)
	}
	return text
}
