package agentapi

import (
	"context"
	"net/url"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Lookup asks for one allocation now: Read may be behind by half a second, and the first process of a task starts some 40 ms after its control group is made. The
// record has the devices of the allocation, and nothing else; Complete is false. It fails if the servers do not show the allocation to the token.
func (c *Client) Lookup(ctx context.Context, allocation string) (holders.Record, error) {
	if c.http == nil || c.base == "" {
		return holders.Record{}, c.fixedError()
	}
	one, err := c.lookup(ctx, allocation)
	if err != nil {
		return holders.Record{}, err
	}
	r := newAnswer(one, "").record
	r.Complete = false
	return r, nil
}

func (c *Client) fixedError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

func (c *Client) lookup(ctx context.Context, id string) ([]allocation, error) {
	once, err := c.withToken()
	if err != nil {
		return nil, err
	}
	var one allocation
	if _, err = once.get(ctx, "/v1/allocation/"+url.PathEscape(id)+"?stale", &one); err != nil {
		return nil, err
	}
	return []allocation{one}, nil
}
