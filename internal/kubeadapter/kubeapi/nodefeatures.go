package kubeapi

import "context"

// featureGroup is the API group of Node Feature Discovery (NFD).
const featureGroup = "nfd.k8s-sigs.io"

// NodeNameLabel is the label of a NodeFeature with the name of its Node.
const NodeNameLabel = "nfd.node.kubernetes.io/node-name"

// NodeFeature is nfd.k8s-sigs.io/v1alpha1 NodeFeature: labels that NFD's master gives to a Node.
type NodeFeature struct {
	APIVersion string          `json:"apiVersion,omitempty"`
	Kind       string          `json:"kind,omitempty"`
	Metadata   ObjectMeta      `json:"metadata"`
	Spec       NodeFeatureSpec `json:"spec"`
}

// NodeFeatureSpec is NodeFeatureSpec of nfd.k8s-sigs.io/v1alpha1. The definition of the resource requires features with all three kinds.
type NodeFeatureSpec struct {
	Features Features          `json:"features"`
	Labels   map[string]string `json:"labels"`
}

// Features is Features of nfd.k8s-sigs.io/v1alpha1, for rules of NFD. Agents have none.
type Features struct {
	Flags      map[string]any `json:"flags"`
	Attributes map[string]any `json:"attributes"`
	Instances  map[string]any `json:"instances"`
}

func featureObject(namespace, name string) object {
	return object{featureGroup, "nodefeatures", namespace, name}
}

// NodeFeature returns a NodeFeature.
func (c *Client) NodeFeature(ctx context.Context, namespace, name string) (NodeFeature, error) {
	return answerOf[NodeFeature](ctx, c, call{verb: "get", object: featureObject(namespace, name)})
}

// CreateNodeFeature creates a NodeFeature.
func (c *Client) CreateNodeFeature(ctx context.Context, f NodeFeature) error {
	return c.do(ctx, call{verb: "create", object: featureObject(f.Metadata.Namespace, ""), body: f.complete()}, nil)
}

// UpdateNodeFeature replaces a NodeFeature of the same resource version. It fails with ErrConflict if it was changed since.
func (c *Client) UpdateNodeFeature(ctx context.Context, f NodeFeature) error {
	return c.do(ctx, call{verb: "update", object: featureObject(f.Metadata.Namespace, f.Metadata.Name), body: f.complete()}, nil)
}

// complete adds what each NodeFeature has.
func (f NodeFeature) complete() NodeFeature {
	f.APIVersion, f.Kind = featureObject("", "").version(), "NodeFeature"
	f.Spec.Features = Features{Flags: map[string]any{}, Attributes: map[string]any{}, Instances: map[string]any{}}
	return f
}
