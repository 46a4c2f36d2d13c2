package agents

import (
	"os"
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
	d.prints(found, "inspect")
	text, err := d.command("doctor")
	if !strings.Contains(text, found) || !strings.Contains(text, "put the component dra") || err == nil {
		t.Errorf("doctor: %v\n%s", err, text)
	}
}
