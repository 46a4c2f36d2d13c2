package agentapi

import (
	"context"
	"net/url"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// Lookup asks for one allocation now: Read may be behind by half a second, and the first process of a task starts some 40 ms after its control group is made. The
// record has the devices of the allocation, and nothing else; Complete is false. It fails if the servers do not show the allocation to the token.
func (c *Client) Lookup(ctx context.Context, id string) (holders.Record, error) {
	if c.http == nil {
		_, err := c.Read(ctx, nil) // that of the files for https
		return holders.Record{}, err
	}
	once, err := c.withToken()
	if err != nil {
		return holders.Record{}, err
	}
	var one allocation
	if _, err = once.get(ctx, "/v1/allocation/"+url.PathEscape(id)+"?stale", &one); err != nil {
		return holders.Record{}, err
	}
	r := newAnswer([]allocation{one}, "").record
	r.Complete = false
	return r, nil
}
