package main

import (
	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/policy"
)

// known are the keys that may stand in the configuration file: those of the table, and the sections that say
// which devices are offered and how.
func known(table []option) map[string]configfile.Kind {
	keys := map[string]configfile.Kind{}
	for _, o := range table {
		if o.key != "" {
			keys[o.key] = o.kind
		}
	}
	for _, section := range policy.Sections() {
		keys[section] = configfile.Section
	}
	return keys
}
