package kubeapi

import (
	"context"
	"net/url"
	"strings"
)

const (
	resourceGroup = "resource.k8s.io"
	apiVersion    = resourceGroup + "/v1"
)

// Claim returns a ResourceClaim.
func (c *Client) Claim(ctx context.Context, namespace, name string) (ResourceClaim, error) {
	return answerOf[ResourceClaim](ctx, c, call{verb: "get", object: object{resourceGroup, "resourceclaims", namespace, name}})
}

// Node returns a Node.
func (c *Client) Node(ctx context.Context, name string) (Node, error) {
	return answerOf[Node](ctx, c, call{verb: "get", object: object{"", "nodes", "", name}})
}

// SliceSelector selects ResourceSlices by fields that the API server indexes; "" = any.
type SliceSelector struct{ Node, Driver string }

func (s SliceSelector) query() url.Values {
	fields := []string{}
	if s.Node != "" {
		fields = append(fields, "spec.nodeName="+s.Node)
	}
	if s.Driver != "" {
		fields = append(fields, "spec.driver="+s.Driver)
	}
	q := url.Values{}
	if len(fields) > 0 {
		q.Set("fieldSelector", strings.Join(fields, ","))
	}
	return q
}

func sliceObject(name string) object { return object{resourceGroup, "resourceslices", "", name} }

// Slices returns the ResourceSlices that a selector selects, as of now.
func (c *Client) Slices(ctx context.Context, s SliceSelector) (SliceList, error) {
	return answerOf[SliceList](ctx, c, call{verb: "list", object: sliceObject(""), query: s.query()})
}

// Slice returns one ResourceSlice.
func (c *Client) Slice(ctx context.Context, name string) (ResourceSlice, error) {
	return answerOf[ResourceSlice](ctx, c, call{verb: "get", object: sliceObject(name)})
}

// Write is how a slice is written.
type Write int

// The kinds of writes.
const (
	Store  Write = iota
	DryRun       // validated, defaulted and admitted, but not stored
)

func (w Write) query() url.Values {
	if w == DryRun {
		return url.Values{"dryRun": {"All"}}
	}
	return nil
}

// CreateSlice creates a slice and returns it as the server stored it: fields of disabled feature gates are gone.
func (c *Client) CreateSlice(ctx context.Context, s ResourceSlice, w Write) (ResourceSlice, error) {
	s.APIVersion, s.Kind = apiVersion, "ResourceSlice"
	stored, err := answerOf[ResourceSlice](ctx, c, call{verb: "create", object: sliceObject(""), query: w.query(), body: s})
	return stored, named(err, s)
}

// UpdateSlice replaces a slice of the same resource version and returns it as the server stored it. It fails with ErrConflict if it was
// changed since.
func (c *Client) UpdateSlice(ctx context.Context, s ResourceSlice, w Write) (ResourceSlice, error) {
	s.APIVersion, s.Kind = apiVersion, "ResourceSlice"
	return answerOf[ResourceSlice](ctx, c, call{verb: "update", object: sliceObject(s.Metadata.Name), query: w.query(), body: s})
}

// DeleteSlice deletes a slice of that name and UID; any UID if it is "". It fails with ErrNotFound if there is none, and with ErrConflict
// if there is another one of the name.
func (c *Client) DeleteSlice(ctx context.Context, name, uid string) error {
	options := struct {
		APIVersion    string            `json:"apiVersion"`
		Kind          string            `json:"kind"`
		Preconditions map[string]string `json:"preconditions,omitempty"`
	}{APIVersion: "v1", Kind: "DeleteOptions"}
	if uid != "" {
		options.Preconditions = map[string]string{"uid": uid}
	}
	return c.do(ctx, call{verb: "delete", object: sliceObject(name), body: options}, nil)
}

// named adds the name of the slice to the error of a create, whose path has none.
func named(err error, s ResourceSlice) error {
	switch e := err.(type) { //nolint:errorlint // the errors of do, which wraps none of them
	case *StatusError:
		e.Object = sliceObject(s.Metadata.Name).String()
	case *RequestError:
		e.Object = sliceObject(s.Metadata.Name).String()
	}
	return err
}
