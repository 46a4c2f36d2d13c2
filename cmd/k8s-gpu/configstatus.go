package main

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// configStatus is what became of the configuration since the process began. It is safe for concurrent use;
// nil knows nothing.
type configStatus struct {
	mu      sync.Mutex
	good    time.Time // when it was last read without a problem
	bad     time.Time // when it was found bad, if that was later
	problem string    // in one line
}

func (c *configStatus) loaded(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.good, c.bad, c.problem = now, time.Time{}, ""
}

func (c *configStatus) refused(now time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bad, c.problem = now, strings.ReplaceAll(err.Error(), "\n", "; ")
}

// notes say in a line that the configuration in force is not the one that is written down.
func (c *configStatus) notes() []string {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bad.IsZero() {
		return nil
	}
	at := func(t time.Time) string { return t.UTC().Format(time.RFC3339) }
	return []string{fmt.Sprintf("configuration not reloaded at %s, that of %s is in force: %s", at(c.bad), at(c.good), c.problem)}
}

// The names are Prometheus' own for the same.
var (
	reloadedDesc = prometheus.NewDesc("tandem_config_last_reload_successful",
		"0 if the configuration was bad when it was last read: an older one is in force.", nil, nil)
	reloadTimeDesc = prometheus.NewDesc("tandem_config_last_reload_success_timestamp_seconds",
		"When the configuration was last read without a problem.", nil, nil)
)

// collect sends the metrics.
func (c *configStatus) collect(metrics chan<- prometheus.Metric) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	metrics <- prometheus.MustNewConstMetric(reloadedDesc, prometheus.GaugeValue, one(c.bad.IsZero()))
	metrics <- prometheus.MustNewConstMetric(reloadTimeDesc, prometheus.GaugeValue, float64(c.good.UnixMilli())/1000)
}
