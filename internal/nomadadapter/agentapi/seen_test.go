package agentapi

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/holders"
)

// What was seen to have a device has it until an answer shows that it has ended.
func TestSeen(t *testing.T) {
	record := func(complete bool, ended []string, live ...string) holders.Record {
		r := holders.Record{Complete: complete, Work: map[string]holders.Work{}}
		for _, id := range ended {
			r.Work[id] = holders.Work{ID: id}
		}
		for _, id := range live {
			r.Work[id] = holders.Work{ID: id}
			r.Holders = append(r.Holders, holders.Holder{Work: holders.Work{ID: id}})
		}
		return r
	}
	for name, tc := range map[string]struct {
		answer   holders.Record
		byLeader bool
		want     []string
	}{
		"it goes on":                            {record(true, nil, "a", "b"), false, []string{"a", "b"}},
		"one has ended":                         {record(true, []string{"a"}, "b"), false, []string{"b"}},
		"a server that lags behind has neither": {record(true, nil), false, []string{"a", "b"}},
		"the leader has neither":                {record(true, nil), true, nil},
		"the leader hides some":                 {record(false, nil, "b"), true, []string{"a", "b"}},
		"another one":                           {record(true, nil, "c"), true, []string{"c"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := New(Options{})
			c.see(record(true, nil, "a", "b"), false)
			c.see(tc.answer, tc.byLeader)
			var got []string
			for _, h := range c.Seen().Holders {
				got = append(got, h.Work.ID)
			}
			if slices.Sort(got); !slices.Equal(got, tc.want) {
				t.Errorf("seen: %q, want %q", got, tc.want)
			}
		})
	}
}
