package agentapi

import (
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// confirmed asks for a confirmation and waits for it.
func confirmed(t *testing.T, c *Client) Confirmation {
	t.Helper()
	began := time.Now()
	if !c.Confirm() {
		t.Fatal("not asked")
	}
	for deadline := began.Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if is := c.Confirmed(); is.At.After(began) {
			return is
		}
	}
	t.Fatal("no confirmation")
	return Confirmation{}
}

// A confirmation has what was placed before it, also while the query that waits gets no answer. Without a question none is made.
func TestConfirm(t *testing.T) {
	a := newAgent()
	server := httptest.NewServer(a)
	defer server.Close()
	c, changed, _, stop := started(t, Options{Address: server.URL})
	defer stop() // before the server, which waits for the query that it never answers
	await(t, changed)
	if is := c.Confirmed(); !is.At.IsZero() || a.asked != 0 {
		t.Errorf("without a question: %+v", is)
	}
	a.mu.Lock()
	a.hang = true
	a.mu.Unlock()
	a.set(alloc("a1", "train", "running", gpus))
	if is := confirmed(t, c); is.Err != nil || len(is.Record.Holders) != 2 || !is.Record.Complete {
		t.Errorf("%+v", is)
	}
	if r, err := c.Read(t.Context(), nil); err != nil || len(r.Holders) != 0 {
		t.Errorf("the query that waits was answered: %+v, %v", r, err)
	}
	a.setFail(true)
	if is := confirmed(t, c); is.Err == nil || !strings.Contains(is.Err.Error(), "No cluster leader") || len(is.Record.Holders) != 0 {
		t.Errorf("failing: %+v", is)
	}
	if unusable := New(Options{LookupEnv: func(string) (string, bool) { return "/nowhere", true }}); unusable.Confirm() {
		t.Error("asked without the files for https")
	}
}
