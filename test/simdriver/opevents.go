package simdriver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// operationalWords are those of an operational event: see lib/opevents.c.
var operationalWords = []string{"module", "severity", "level", "code", "attributes", "group_attributes", "group", "context", "xid"}

// Operational raises an operational event of a driver from 615 on: "severity=40", "level=50", "xid=79" ... Only event sets in which the GPU
// was registered for such events before get it.
func (m *Machine) Operational(slot int, words ...string) error {
	id := m.UUID(slot)
	if id == "" {
		return fmt.Errorf("raise operational event: no GPU in slot %d", slot)
	}
	for _, word := range words {
		if key, _, _ := strings.Cut(word, "="); !slices.Contains(operationalWords, key) || strings.ContainsAny(word, " \n") {
			return fmt.Errorf("raise operational event: %q is none of %s", word, strings.Join(operationalWords, ", "))
		}
	}
	return m.appendEvent(strings.Join(append([]string{"operational", id}, words...), " "))
}

// With615 is the text of a machine with a driver of branch 615, whose GPUs have operational events.
func With615(nameOrFile string) (string, error) {
	text, err := Text(nameOrFile)
	if err != nil {
		return "", err
	}
	c := parseConf(text)
	err = errors.Join(c.set("machine", "driver", "615.36.01"), c.set("machine", "cuda", "13.4"), c.set("defaults", "operational_events", "yes"))
	return c.String(), err
}
