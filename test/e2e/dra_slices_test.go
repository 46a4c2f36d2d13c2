//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// sliceTrace records, from a watch of the API server, when the slices of a node were all deleted, and when its devices were there again.
type sliceTrace struct {
	node    *kubeNode
	devices int // when all are there

	mu     sync.Mutex
	now    map[string]kubeapi.ResourceSlice // by name
	wiped  time.Time                        // when the last one was deleted; zero: there are some
	gaps   []time.Duration                  // for how long there was less, each time that all had been deleted
	writes int                              // events of the watch
	twice  []string                         // devices that two slices had at once
}

// traceSlices follows until the end of the test the slices of a node, whose agent publishes so many devices.
func traceSlices(t *testing.T, n *kubeNode, devices int) *sliceTrace {
	t.Helper()
	s := &sliceTrace{node: n, devices: devices, now: map[string]kubeapi.ResourceSlice{}}
	var following sync.WaitGroup
	ctx := t.Context()
	following.Go(func() {
		for ctx.Err() == nil {
			_ = s.follow(ctx) // the API server has ended, or the watch has: again
			time.Sleep(lookEvery)
		}
	})
	t.Cleanup(following.Wait)
	s.await(t, 0)
	return s
}

// follow reads the state and its changes until the connection ends.
func (s *sliceTrace) follow(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, kubeAPI+"/apis/resource.k8s.io/v1/resourceslices?watch=true&fieldSelector=spec.driver="+
		draDriver+",spec.nodeName="+s.node.name, http.NoBody)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer admin")
	answer, err := client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	for events := json.NewDecoder(answer.Body); ; {
		var event struct {
			Type   string
			Object kubeapi.ResourceSlice
		}
		if err := events.Decode(&event); err != nil {
			return err
		}
		s.note(time.Now(), event.Type, event.Object)
	}
}

func (s *sliceTrace) note(at time.Time, kind string, slice kubeapi.ResourceSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes++
	if delete(s.now, slice.Metadata.Name); kind != "DELETED" {
		s.now[slice.Metadata.Name] = slice
	}
	names := map[string]bool{}
	for _, other := range s.now {
		for _, d := range other.Spec.Devices {
			if names[d.Name] {
				s.twice = append(s.twice, d.Name)
			}
			names[d.Name] = true
		}
	}
	switch {
	case len(s.now) == 0:
		s.wiped = at
	case !s.wiped.IsZero() && len(names) == s.devices:
		s.gaps = append(s.gaps, at.Sub(s.wiped))
		s.wiped = time.Time{}
	}
}

// wipes is how often all slices have been deleted and written again.
func (s *sliceTrace) wipes() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.gaps)
}

// await waits until the slices have been deleted and written again so many times, and all devices are there.
func (s *sliceTrace) await(t *testing.T, wipes int) {
	t.Helper()
	await(t, fmt.Sprintf("the slices of %s after wipe %d", s.node.name, wipes), 60*time.Second, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		count := 0
		for _, one := range s.now {
			count += len(one.Spec.Devices)
		}
		if len(s.gaps) < wipes || count != s.devices {
			return errors.Join(fmt.Errorf("wiped %d times, %d devices", len(s.gaps), count), s.node.kubelet.alive())
		}
		return nil
	})
}

// check fails if two slices had one device, and returns how long the devices were away.
func (s *sliceTrace) check(t *testing.T) string {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.twice) > 0 {
		t.Errorf("in two slices at once: %q", s.twice)
	}
	return percentiles(s.gaps)
}

// percentiles are p50, p99 and the greatest.
func percentiles(all []time.Duration) string {
	if len(all) == 0 {
		return "never"
	}
	sorted := slices.Sorted(slices.Values(all))
	at := func(percent int) time.Duration { return sorted[(len(sorted)-1)*percent/100].Round(time.Millisecond) }
	return fmt.Sprintf("p50 %v, p99 %v, max %v, %d times", at(50), at(99), at(100), len(sorted))
}
