package agentapi

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// An agent's Go code has one CPU (decision 20). While one goroutine computes in one piece, the network and the control groups of tasks that begin
// are looked at every 10 ms only (runtime.sysmon). So reading a list pauses for computeAtOnce each time, and the next query comes pauseRatio times as long after it as it took.
const (
	computeAtOnce = time.Millisecond
	pauseRatio    = 9
)

// readAllocations reads a list of allocations, one after the other. The servers keep those that have ended for hours or, of batch jobs, for a day (batch_eval_gc_threshold):
// with short jobs a node has thousands, of some 6 kB each, and gets all of them whenever one changes. took is the time without pauses.
func readAllocations(ctx context.Context, d *json.Decoder) (all []allocation, took time.Duration, err error) {
	begin, err := d.Token()
	if err != nil || begin == nil { // null
		return nil, 0, err
	}
	if begin != json.Delim('[') {
		return nil, 0, fmt.Errorf("begins with %v: want a list of allocations", begin)
	}
	for since := time.Now(); d.More(); {
		var one allocation
		if err := d.Decode(&one); err != nil {
			return nil, took, err
		}
		if !one.live() {
			one.Job = nil
		}
		all = append(all, one)
		if passed := time.Since(since); passed >= computeAtOnce {
			took += passed
			if !watch.Sleep(ctx, computeAtOnce) {
				return nil, took, ctx.Err()
			}
			since = time.Now()
		}
	}
	_, err = d.Token() // the end of the list, or why there is none
	return all, took, err
}
