package nomadadapter

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
)

// healthSpec is the schema of a key of health: a bool, a number or a text, as its default is.
//
// The XIDs are a block and not an attribute of type map: Nomad reads its agent's configuration as HCL 1,
// where both spellings, xids { ... } and xids = { ... }, are a list of maps, which fits a block only.
func healthSpec(k healthconfig.Key) *hclspec.Spec {
	if k.Name == healthconfig.XIDs {
		return hclspec.NewBlockAttrs(k.Name, "string", false)
	}
	if _, err := strconv.Atoi(k.Default); err == nil {
		return optional(k.Name, "number", k.Default)
	}
	if _, err := strconv.ParseBool(k.Default); err == nil {
		return optional(k.Name, "bool", k.Default)
	}
	return optional(k.Name, "string", strconv.Quote(k.Default))
}

// healthValues reads the keys of health in a config block, and returns every problem.
func healthValues(block map[string]any) (v healthconfig.Values, problems []error) {
	v = healthconfig.Default()
	for _, k := range healthconfig.Keys() {
		given := block[k.Name]
		if given == nil {
			continue
		}
		text := healthText(given)
		if err := k.Set(&v, text); err != nil {
			problems = append(problems, &core.ConfigError{Key: k.Name, Value: text, Remedy: err.Error()})
		}
	}
	if len(v.Health.XIDs) == 0 {
		v.Health.XIDs = nil // as if nothing was said
	}
	return v, problems
}

// healthText spells a value as on a command line: a map is "63=ignore,999=unhealthy".
func healthText(given any) string {
	m, ok := given.(map[string]any)
	if !ok {
		return fmt.Sprint(given)
	}
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		pairs = append(pairs, fmt.Sprintf("%s=%v", key, m[key]))
	}
	return strings.Join(pairs, ",")
}
