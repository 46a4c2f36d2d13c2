package kubeapi

import (
	"context"
	"iter"
	"net/url"
)

// asMetadata asks for an object without spec and status: a Node's have up to 100 kB, and its status changes every few minutes.
const asMetadata = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

// metadataOnly is metav1.PartialObjectMetadata.
type metadataOnly struct {
	Metadata ObjectMeta `json:"metadata"`
}

// NodeEvent is an event of a watch of one Node.
type NodeEvent struct {
	Type EventType
	Node ObjectMeta
}

// NodeMetadata returns the metadata of a Node.
func (c *Client) NodeMetadata(ctx context.Context, name string) (ObjectMeta, error) {
	node, err := answerOf[metadataOnly](ctx, c, call{verb: "get", object: object{"", "nodes", "", name}, accept: asMetadata})
	return node.Metadata, err
}

// WatchNode yields the metadata of a Node as WatchSlices does slices. It takes the verb watch on nodes, and not list.
func (c *Client) WatchNode(ctx context.Context, name, resourceVersion string) iter.Seq2[NodeEvent, error] {
	r := call{verb: "watch", object: object{resource: "nodes"}, query: url.Values{"fieldSelector": {"metadata.name=" + name}}, accept: asMetadata}
	return watchFrom(ctx, c, r, resourceVersion, func(t EventType, o metadataOnly) NodeEvent { return NodeEvent{t, o.Metadata} })
}

// PodMetadata returns the metadata of a pod.
func (c *Client) PodMetadata(ctx context.Context, namespace, name string) (ObjectMeta, error) {
	pod, err := answerOf[metadataOnly](ctx, c, call{verb: "get", object: object{"", "pods", namespace, name}, accept: asMetadata})
	return pod.Metadata, err
}
