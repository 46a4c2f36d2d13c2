package agents

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The API dra is taken from an agent while a claim is prepared: what is wrong, and what to do, is in the log, in inspect and in doctor.
func TestDRATakenAwayWithClaims(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "h100x8", "")
	d.start()
	c := d.claim("left", 3)
	if _, problem := d.prepare(d.register(), c); problem != "" {
		t.Fatal(problem)
	}
	d.kill()
	d.settings["api"] = "device-plugin"
	d.must(os.RemoveAll(d.registry()))
	d.start()
	const found = "prepared claims and GPUs of the API dra are left on this node"
	d.logs("ERROR", found)
	d.answers()
	d.prints(found, "inspect")
	text, err := d.command("doctor")
	if !strings.Contains(text, found) || !strings.Contains(text, "put the component dra") || err == nil {
		t.Errorf("doctor: %v\n%s", err, text)
	}
}

// The record of a prepared claim is damaged while no agent runs: other claims are prepared and end as ever, doctor names the file with a running agent
// and without one, and the claim itself ends.
func TestDRARecordThatCanNotBeRead(t *testing.T) {
	t.Parallel()
	d := newDRAAgent(t, "h100x8", "")
	d.start()
	damaged, other := d.claim("damaged", 3), d.claim("other", 4)
	if _, problem := d.prepare(d.register(), damaged); problem != "" {
		t.Fatal(problem)
	}
	first := d.sockets()
	d.kill()
	record := filepath.Join(d.state, "dra", "claims", damaged.GetUid()+".json")
	d.must(os.WriteFile(record, []byte("{"), 0o600))
	named := func(when string) {
		t.Helper()
		text, err := d.command("doctor")
		if n := strings.Count(text, record+" can't be read as a prepared claim"); n != 1 || !strings.Contains(text, "kubectl get resourceclaims") || err == nil {
			t.Errorf("%s: %d times, %v\n%s", when, n, err, text)
		}
	}
	named("no agent runs")
	d.start()
	d.await("the socket of the next process", func() bool { return len(d.sockets()) == 1 && !slices.Equal(d.sockets(), first) })
	driver := d.register()
	if _, problem := d.prepare(driver, other); problem != "" {
		t.Error(problem)
	}
	d.logs("WARN", "can't be read as a prepared claim")
	d.answers()
	d.prints(record, "inspect")
	named("the agent runs")
	d.unprepare(driver, other)
	d.unprepare(driver, damaged)
	if _, err := os.Lstat(record); err == nil {
		t.Error("the record is left")
	}
}
