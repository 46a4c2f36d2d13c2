package agentapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// guess is an address that is not configured. The agent there counts if it is this node's client: the servers list a device of this node as
// its own. Else there is no record, which is no failure.
type guess struct {
	devices func() map[gpu.DeviceID]gpu.Placement // of this node

	mu   sync.Mutex
	node string // ID of the node that is this one; "" = none was found
}

// proven reports whether the address is that of this node's agent. A configured one, which has no guess, is.
func (g *guess) proven() bool {
	if g == nil {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.node != ""
}

func (g *guess) is(node string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.node == node
}

func (g *guess) set(node string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.node = node
}

// errNoDevices means that the agent was not asked: this node has no device that work could have, as without a GPU or before its driver is ready.
var errNoDevices = errors.New("this node has no device")

// otherNodeError means that the servers list no device of this node at the node of the agent.
type otherNodeError struct{ address, node string }

func (e *otherNodeError) Error() string {
	return fmt.Sprintf("the Nomad agent at %s is not this node's: its node %s has none of these GPUs", e.address, e.node)
}

// thisNode is the ID of the agent's node, which is this one.
func (c *Client) thisNode(ctx context.Context) (id string, err error) {
	if !c.guess.proven() && len(c.guess.devices()) == 0 {
		return "", errNoDevices
	}
	id, err = c.nodeID(ctx)
	if err != nil || c.guess == nil || c.guess.is(id) {
		return id, err
	}
	n, err := c.node(ctx, id)
	if err != nil {
		return "", err
	}
	devices := c.guess.devices()
	has := func(i Instance) bool { _, ok := devices[deviceOf(i.ID)]; return ok }
	for _, group := range n.NodeResources.Devices {
		if group.Vendor == vendor && slices.ContainsFunc(group.Instances, has) {
			c.guess.set(id)
			return id, nil
		}
	}
	return "", &otherNodeError{c.base, n.Name}
}

// setAddress is the remedy where no agent of this node answers at a guess.
const setAddress = "set nomad_address"

// isUnread reports whether there is no record because a guess is not proven. A file of a token or of https that can't be read is another matter: it is
// configured. c.mu is locked.
func (c *Client) isUnread() bool {
	_, file := errors.AsType[*fs.PathError](c.err)
	return c.err != nil && c.http != nil && !file && !c.guess.proven()
}

// unread is the record of a guess that is not proven: what is missing is no problem, but a setting. c.mu is locked.
func (c *Client) unread() holders.Record {
	r := holders.Record{Never: true, Missing: c.err.Error()}
	if errors.Is(c.err, errFirst) {
		return r
	}
	var certificate *tls.CertificateVerificationError
	var alert tls.AlertError
	_, other := errors.AsType[*otherNodeError](c.err)
	switch {
	case other, errors.Is(c.err, errNoClient):
		r.Remedy = setAddress
	case hasStatus(c.err, http.StatusForbidden, ""), hasStatus(c.err, http.StatusInternalServerError, "ACL token"):
		r.Remedy = "set nomad_token_file"
	case hasStatus(c.err, http.StatusBadRequest, "HTTPS"): // net/http's answer to a request without TLS
		r.Missing = "the Nomad agent at " + c.base + " takes https only, with NOMAD_CACERT and perhaps NOMAD_CLIENT_CERT in its environment"
		r.Remedy = `set nomad_address = "https` + strings.TrimPrefix(c.base, "http") + `"`
	case errors.As(c.err, &certificate):
		r.Remedy = "set NOMAD_CACERT for the Nomad agent"
	case errors.As(c.err, &alert):
		r.Remedy = "set NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY for the Nomad agent"
	default:
		why := c.err
		if dial, ok := errors.AsType[*net.OpError](why); ok {
			why = dial.Err // without the address
		}
		r.Missing, r.Remedy = "no Nomad agent answers at "+c.base+": "+why.Error(), setAddress
	}
	return r
}
