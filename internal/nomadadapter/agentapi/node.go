package agentapi

import (
	"context"
	"errors"
	"net/url"
)

// Node is what the servers have of the agent's node (structs.Node).
type Node struct {
	Name          string
	NodeResources struct{ Devices []Group }
}

// Group is a device group of a node, of whichever plugin.
type Group struct {
	Vendor, Type, Name string
	Instances          []Instance
	Attributes         map[string]Attribute
}

// Instance is a device of a group.
type Instance struct {
	ID, HealthDescription string
	Healthy               bool
	Locality              *struct{ PciBusID string } // nil = not reported
}

// Attribute is a value of one type; the others are nil.
type Attribute struct {
	Float  *float64
	Int    *int64
	String *string
	Bool   *bool
	Unit   string
}

// Node reads the node of the agent. It needs no Run.
func (c *Client) Node(ctx context.Context) (Node, error) {
	if c.http == nil {
		return Node{}, c.err // of the files for https
	}
	id, err := c.nodeID(ctx)
	if err != nil {
		return Node{}, err
	}
	return c.node(ctx, id)
}

func (c *Client) node(ctx context.Context, id string) (n Node, err error) {
	_, err = c.get(ctx, "/v1/node/"+url.PathEscape(id), &n)
	return n, err
}

var errNoClient = errors.New("GET /v1/agent/self: no node ID: the Nomad agent at this address is no client")

// nodeID is the ID of the agent's node.
func (c *Client) nodeID(ctx context.Context) (string, error) {
	var self struct {
		Stats struct {
			Client struct {
				NodeID string `json:"node_id"`
			} `json:"client"`
		} `json:"stats"`
	}
	if _, err := c.get(ctx, "/v1/agent/self", &self); err != nil {
		return "", err
	}
	if self.Stats.Client.NodeID == "" {
		return "", errNoClient
	}
	return self.Stats.Client.NodeID, nil
}
