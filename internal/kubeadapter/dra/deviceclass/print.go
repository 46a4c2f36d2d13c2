package deviceclass

import (
	"bytes"
	"fmt"

	"go.yaml.in/yaml/v3"
)

// object is a DeviceClass as YAML.
type object struct {
	APIVersion string   `yaml:"apiVersion"`
	Kind       string   `yaml:"kind"`
	Metadata   metadata `yaml:"metadata"`
	Spec       spec     `yaml:"spec"`
}

type metadata struct {
	Name string `yaml:"name"`
}

type spec struct {
	Selectors            []selector `yaml:"selectors"`
	ExtendedResourceName string     `yaml:"extendedResourceName,omitempty"`
}

type selector struct {
	CEL struct {
		Expression string `yaml:"expression"`
	} `yaml:"cel"`
}

// Print returns classes as a stream of YAML documents, each with a comment.
func Print(classes []Class) ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s of NVIDIA's driver is not here: this agent has no devices for passthrough to virtual machines.\n", vfioClass)
	for _, c := range classes {
		o := object{APIVersion: "resource.k8s.io/v1", Kind: "DeviceClass", Metadata: metadata{c.Name}}
		o.Spec.Selectors = make([]selector, 1)
		o.Spec.Selectors[0].CEL.Expression = c.Expression
		o.Spec.ExtendedResourceName = c.ExtendedResource
		fmt.Fprintf(&b, "---\n# %s\n", c.About)
		e := yaml.NewEncoder(&b)
		e.SetIndent(2)
		if err := e.Encode(o); err != nil {
			return nil, fmt.Errorf("DeviceClass %s: %w", c.Name, err)
		}
	}
	return b.Bytes(), nil
}
