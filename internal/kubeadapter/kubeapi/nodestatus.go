package kubeapi

import (
	"context"
	"time"
)

// strategicMerge is the type of a patch in which conditions are merged by their type. Others replace the whole list.
const strategicMerge = "application/strategic-merge-patch+json"

// ConditionStatus is ConditionStatus of v1. The API server takes any text for it.
type ConditionStatus string

// Statuses of a condition.
const (
	ConditionTrue    ConditionStatus = "True"
	ConditionFalse   ConditionStatus = "False"
	ConditionUnknown ConditionStatus = "Unknown"
)

// NodeCondition is NodeCondition of v1. The API server neither checks nor sets any of it.
type NodeCondition struct {
	Type               string          `json:"type"`
	Status             ConditionStatus `json:"status,omitempty"`
	Reason             string          `json:"reason,omitempty"`
	Message            string          `json:"message,omitempty"`
	LastHeartbeatTime  *time.Time      `json:"lastHeartbeatTime,omitempty"`
	LastTransitionTime *time.Time      `json:"lastTransitionTime,omitempty"` // a patch without it keeps it
	Patch              string          `json:"$patch,omitempty"`             // of a patch: DeleteCondition
}

// DeleteCondition removes a condition by a patch.
const DeleteCondition = "delete"

// NodeConditions returns metadata and conditions of a Node.
func (c *Client) NodeConditions(ctx context.Context, name string) (ObjectMeta, []NodeCondition, error) {
	node, err := answerOf[struct {
		Metadata ObjectMeta `json:"metadata"`
		Status   struct {
			Conditions []NodeCondition `json:"conditions"`
		} `json:"status"`
	}](ctx, c, call{verb: "get", object: object{"", "nodes", "", name}})
	return node.Metadata, node.Status.Conditions, err
}

// NodePatch is a strategic merge patch of a Node: what it does not have stays.
type NodePatch struct {
	Metadata struct {
		Labels      map[string]*string `json:"labels,omitempty"`      // nil = it is removed
		Annotations map[string]*string `json:"annotations,omitempty"` // nil = it is removed
	} `json:"metadata,omitzero"`
	Status struct {
		Conditions []NodeCondition `json:"conditions,omitempty"`
	} `json:"status,omitzero"`
}

// PatchNodeStatus patches status and metadata of a Node in one request. It takes the verb patch on nodes/status alone, which is also one on labels.
func (c *Client) PatchNodeStatus(ctx context.Context, name string, p NodePatch, w Write) error {
	return c.do(ctx, call{
		verb: "patch", object: object{"", "nodes", "", name}, subresource: "status", query: w.query(), body: p, content: strategicMerge, accept: asMetadata,
	}, nil)
}
