package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Nothing is on disk before Nomad asks about devices: most processes are started to be told the
// configuration, and end.
func TestConfigurationLeavesNoTrace(t *testing.T) {
	m, dir := simdriver.Start(t, "t4"), filepath.Join(shortDir(t), "state")
	p, client, _ := start(t)
	for range 2 {
		configure(t, p, keys(m, dir))
	}
	client.Kill()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want nothing", dir, err)
	}
}

// Two processes for a moment: the second one takes orders as soon as the first is gone.
func TestNextProcessTakesOrders(t *testing.T) {
	m, dir := simdriver.Start(t, "t4"), shortDir(t)
	a := run(t, m, dir, nil)
	a.healthy(1, 1)
	await(t, "an answer", patience, func() bool { return reportOf(a).Source == report.FromAgent })
	b := run(t, m, dir, nil)
	b.healthy(1, 1)
	b.said("[INFO]", "control socket unavailable")
	a.kill() // and its socket stays
	await(t, "an answer of the second process", patience, func() bool { return reportOf(b).Source == report.FromAgent })
	if n := strings.Count(b.log.String(), "control socket unavailable"); n != 1 {
		t.Errorf("said %d times that it waits", n)
	}
}
