//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"
)

// nomadTrace records every lookEvery what a Nomad node offers, as the server shows it, and how many of its GPUs are allocated.
type nomadTrace struct {
	*agent
	began   time.Time
	client  *http.Client
	view    *view
	mistake bool // what follows is one of an operator: it is measured only
}

// nomadCounts is one look: the node's GPUs, and the devices in the client's own statistics, -1 = its API does not answer.
type nomadCounts struct{ listed, healthy, allocated, statistics int }

const countsFormat = "listed %d, healthy %d, allocated %d, client's statistics %d"

func (c nomadCounts) String() string {
	return fmt.Sprintf(countsFormat, c.listed, c.healthy, c.allocated, c.statistics)
}

// parseCounts returns false for noAnswer.
func parseCounts(what string) (c nomadCounts, ok bool) {
	_, err := fmt.Sscanf(what, countsFormat, &c.listed, &c.healthy, &c.allocated, &c.statistics)
	return c, err == nil
}

// traceCapacity begins to record, until the end of the test.
func (a *agent) traceCapacity(t *testing.T) *nomadTrace {
	t.Helper()
	c := &nomadTrace{agent: a, began: time.Now(), client: &http.Client{Timeout: belowAtMost}}
	c.view = follow(t, a.member, func() (string, error) {
		counts, err := c.look()
		text := counts.String()
		if err != nil {
			text = noAnswer
		}
		return text, nil
	})
	return c
}

func (c *nomadTrace) look() (counts nomadCounts, err error) {
	var nodes []node
	var allocs []allocation
	var own struct {
		DeviceStats []struct{ InstanceStats map[string]any }
	}
	err = errors.Join(c.ask(nomadAPI+"/v1/nodes?resources=true", &nodes), c.ask(nomadAPI+"/v1/allocations?resources=true", &allocs))
	for _, n := range nodes {
		if n.Name == c.member {
			counts.listed, counts.healthy = len(n.gpus()), n.healthy()
		}
	}
	for _, alloc := range allocs {
		if alloc.NodeName == c.member && alloc.DesiredStatus == "run" && (alloc.ClientStatus == "running" || alloc.ClientStatus == "pending") {
			counts.allocated += len(alloc.devices())
		}
	}
	if c.ask(fmt.Sprintf("http://127.0.0.1:%d/v1/client/stats", c.port), &own) != nil {
		counts.statistics = -1
	}
	for _, group := range own.DeviceStats {
		counts.statistics += len(group.InstanceStats)
	}
	return counts, err
}

// ask is fetchJSON with a time limit that keeps the looks dense.
func (c *nomadTrace) ask(url string, into any) error {
	answer, err := c.client.Get(url)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		return errors.New(answer.Status)
	}
	return json.NewDecoder(answer.Body).Decode(into)
}

// during does something, waits until the client serves all eight GPUs again, and checks and writes the trace of that time.
func (c *nomadTrace) during(t *testing.T, what string, do func()) {
	t.Helper()
	from := time.Now()
	do()
	time.Sleep(2 * lookEvery) // what is awaited is not from before
	c.view.await(t, from, "^listed 8, .* statistics 8$")
	to := time.Now()
	all := c.view.periods(from, to)
	silent := longest(all, func(what string) bool { return what == noAnswer })
	below := longest(answered(all), func(what string) bool {
		counts, ok := parseCounts(what)
		return !ok || counts.healthy < counts.allocated
	})
	away := longest(all, func(what string) bool {
		counts, ok := parseCounts(what)
		return ok && counts.statistics < 0
	})
	text := fmt.Sprintf("fewer healthy than allocated for %.2f s; the server did not answer for %.2f s, the client for %.2f s",
		below.Seconds(), silent.Seconds(), away.Seconds())
	recordTrace(t, what, text, c.began, from, to, c.view)
	if below > belowAtMost && !c.mistake {
		t.Errorf("%s: %s", what, text)
	}
}
