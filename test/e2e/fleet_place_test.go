//go:build e2e

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// prefers are the lines of a device that has an affinity to a model.
func prefers(model string) string {
	return fmt.Sprintf("affinity {\n attribute = \"${device.model}\"\n value = %q\n weight = 100\n }", model)
}

// where are the lines of a device with a constraint.
func where(attribute, operator, value string) string {
	return fmt.Sprintf("constraint {\n attribute = \"${device.%s}\"\n operator = %q\n value = %q\n }", attribute, operator, value)
}

// place submits jobs that one node or both can run.
func (f *fleet) place(t *testing.T) {
	jobs := []struct {
		fleetJob
		want map[string]int
	}{
		{fleetJob{name: "by-model", device: where("model", "=", "NVIDIA L40S")}, map[string]int{"l40s": 1}},
		{fleetJob{name: "by-memory", device: where("attr.memory", ">=", "60 GiB")}, map[string]int{"h100": 1}},
		{fleetJob{name: "by-architecture", device: where("attr.architecture", "=", "Ada Lovelace")}, map[string]int{"l40s": 1}},
		{fleetJob{name: "prefers-l40s", device: prefers("NVIDIA L40S")}, map[string]int{"l40s": 1}},
		{fleetJob{name: "prefers-h100", device: prefers("NVIDIA H100 80GB HBM3")}, map[string]int{"h100": 1}},
		{fleetJob{name: "spread", count: 4, group: "spread {\n attribute = \"${node.unique.name}\"\n }"}, map[string]int{"h100": 2, "l40s": 2}},
	}
	for _, j := range jobs {
		j.submit(t)
	}
	for _, j := range jobs {
		f.awaitOn(t, j.name, j.want)
	}
	f.awaitLoad(t, map[string]int{"h100": 4, "l40s": 5})
	for _, j := range jobs {
		f.purge(t, j.name)
	}
	f.awaitLoad(t, map[string]int{})
	fleetJob{name: "seven", gpus: 7}.submit(t) // the other node has six
	fleetJob{name: "nine", gpus: 9}.submit(t)
	f.awaitOn(t, "seven", map[string]int{"h100": 1})
	f.h100.awaitBlocked(t, "nine")
	f.purge(t, "seven", "nine")
	f.awaitLoad(t, map[string]int{})
}

// drain drains the node with eight jobs: six go to the six GPUs of the other node, two wait until the node takes work again. Then it
// drains the other one, so that all are back.
func (f *fleet) drain(t *testing.T) {
	f.h100.drain(t, "-enable", "-deadline=1m")
	f.awaitLoad(t, map[string]int{"l40s": 6})
	await(t, "no job on the drained node, and it to be ineligible", 30*time.Second, func() error {
		n, err := f.h100.node()
		if err == nil && n.SchedulingEligibility != "ineligible" {
			err = fmt.Errorf("it is %s", n.SchedulingEligibility)
		}
		return err
	})
	f.h100.awaitGPUs(t, 8, 8) // a drained node still shows its GPUs
	f.h100.drain(t, "-disable")
	f.awaitLoad(t, map[string]int{"l40s": 6, "h100": 2})
	f.l40s.drain(t, "-enable", "-deadline=1m")
	f.awaitLoad(t, map[string]int{"h100": 8})
	f.l40s.drain(t, "-disable")
}

// drain calls the command on this node.
func (a *agent) drain(t *testing.T, options ...string) {
	t.Helper()
	n, err := a.node()
	if err != nil {
		t.Fatal(err)
	}
	argv := slices.Concat([]string{"nomad", "node", "drain", "-address=" + nomadAPI, "-yes", "-detach"}, options, []string{n.ID})
	t.Logf("%s: %s", strings.Join(argv, " "), must(t, argv...))
}
