package main

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// call is a request to a plugin.
type call struct {
	name string
	do   func() error
}

// latencies times n calls of each kind by concurrent callers, each of which makes one after the other in turn, so that they share the
// state of the machine. The first call does nothing: the figures of the others are also ratios to its own.
func latencies(calls []call, callers, n int) (figures []figure, err error) {
	times := make([][]float64, len(calls)) // in microseconds
	var mu sync.Mutex
	var group errgroup.Group
	for range callers {
		group.Go(func() error {
			for range (n + callers - 1) / callers {
				for i, c := range calls {
					start := time.Now()
					if err := c.do(); err != nil {
						return fmt.Errorf("%s: %w", c.name, err)
					}
					took := float64(time.Since(start).Nanoseconds()) / 1e3
					mu.Lock()
					times[i] = append(times[i], took)
					mu.Unlock()
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	for i, c := range calls {
		for _, q := range []float64{0.5, 0.99, 0.999} {
			name := fmt.Sprintf("%s, %d callers, p%s", c.name, callers, strconv.FormatFloat(q*100, 'g', 4, 64))
			took := quantile(times[i], q)
			figures = append(figures, figure{name, "us", took})
			if i > 0 {
				figures = append(figures, figure{name + " / empty call", ratio, took / quantile(times[0], q)})
			}
		}
	}
	return figures, nil
}

// quantile sorts the values.
func quantile(values []float64, q float64) float64 {
	slices.Sort(values)
	return values[int(q*float64(len(values)-1))]
}
