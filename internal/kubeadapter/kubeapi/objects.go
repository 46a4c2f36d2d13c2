package kubeapi

import (
	"context"
	"net/http"
	"net/url"
	"strings"
)

const (
	resourceGroup = "resource.k8s.io"
	apiVersion    = resourceGroup + "/v1"
)

// Claim returns a ResourceClaim.
func (c *Client) Claim(ctx context.Context, namespace, name string) (ResourceClaim, error) {
	var claim ResourceClaim
	o := object{resourceGroup, "resourceclaims", namespace, name}
	err := c.do(ctx, call{verb: "get", method: http.MethodGet, object: o}, &claim)
	return claim, err
}

// Node returns a Node.
func (c *Client) Node(ctx context.Context, name string) (Node, error) {
	var node Node
	err := c.do(ctx, call{verb: "get", method: http.MethodGet, object: object{"", "nodes", "", name}}, &node)
	return node, err
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
	var list SliceList
	err := c.do(ctx, call{verb: "list", method: http.MethodGet, object: sliceObject(""), query: s.query()}, &list)
	return list, err
}

// Slice returns one ResourceSlice.
func (c *Client) Slice(ctx context.Context, name string) (ResourceSlice, error) {
	var slice ResourceSlice
	err := c.do(ctx, call{verb: "get", method: http.MethodGet, object: sliceObject(name)}, &slice)
	return slice, err
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
	var stored ResourceSlice
	err := c.do(ctx, call{verb: "create", method: http.MethodPost, object: sliceObject(""), query: w.query(), body: s}, &stored)
	return stored, named(err, s)
}

// UpdateSlice replaces a slice of the same resource version and returns it as the server stored it. It fails with ErrConflict if it was
// changed since.
func (c *Client) UpdateSlice(ctx context.Context, s ResourceSlice, w Write) (ResourceSlice, error) {
	s.APIVersion, s.Kind = apiVersion, "ResourceSlice"
	var stored ResourceSlice
	r := call{verb: "update", method: http.MethodPut, object: sliceObject(s.Metadata.Name), query: w.query(), body: s}
	err := c.do(ctx, r, &stored)
	return stored, err
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
	return c.do(ctx, call{verb: "delete", method: http.MethodDelete, object: sliceObject(name), body: options}, nil)
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
