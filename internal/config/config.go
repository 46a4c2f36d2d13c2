// Package config reads the settings of both agents from the command line, the environment, the configuration file and the
// plugin block of a Nomad agent. Each agent has one table of options, with every spelling of each. Every problem is
// reported with its place: a flag, a variable, a line and key of the file, or a key of the block.
package config

import (
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// repeatable reports whether a flag of an option of this kind may be given several times.
func repeatable(k schema.Kind) bool { return k == schema.List || k == schema.Mapping }

// wanted is the remedy for a value of another kind.
func wanted(k schema.Kind) string {
	switch k {
	case schema.List:
		return "want a list"
	case schema.Mapping:
		return "want a mapping"
	default:
		return "want a single value"
	}
}

// Spec is an option in all its spellings, bound to the variable that it sets; "" = it has none there.
type Spec struct {
	Flag    string
	Aliases []string // of the flag
	Env     []string // the first that is set has precedence
	Key     string   // of the configuration file: "flags.migStrategy"
	HCL     string   // of the plugin block of a Nomad agent
	Usage   string   // in one line, for the help
	Note    string   // what else the documentation has, in Markdown
	Default string
	Empty   bool // an empty variable or scalar is a value; for other options it is as if it were not set
	Exists  bool // the path is expected on the host: see missing
	Hidden  bool // not supported, or without effect
	binding

	without string // of an option without a setter: why it has no effect
}

// binding is which values an option has, and what they set. The functions that return a binding make the two of the same data, so that
// documentation and schema have what is accepted. Without set and setItem the option is not supported.
type binding struct {
	schema.Type
	set     setter
	setItem func(string) error // in place of set: sets one item of a list; the error is the remedy
}

// Name is the key of the configuration file, or else the flag.
func (s Spec) Name() string {
	if s.Key != "" {
		return s.Key
	}
	return "--" + s.Flag
}

// Without is why the option has no effect; "" if it has one.
func (s Spec) Without() string { return s.without }

// counts reports whether a value of the file is more than no value.
func (s Spec) counts(v Value) bool { return v.Text != "" || s.Empty || s.Kind != schema.Scalar }

// setter sets the variable of an option. The error is the remedy.
type setter func(Value) error

// apply sets the option, and returns every problem. After a problem the option has its default, but for a list, which then has the
// items without a problem: what of a configuration is valid can be used.
func (s Spec) apply(v Value) (problems []error) {
	check := func(value string, err error) {
		if err != nil {
			problems = append(problems, &setting.Error{Key: v.Where, Value: value, Remedy: err.Error()})
		}
	}
	if s.setItem == nil {
		if check(v.Text, s.set(v)); problems != nil {
			s.reset()
		}
		return problems
	}
	for _, item := range v.items() {
		check(item, s.setItem(item))
	}
	return problems
}

// reset sets the default, which is valid.
func (s Spec) reset() {
	if s.setItem == nil {
		_ = s.set(Value{Text: s.Default})
	}
}

// Value is the value of an option and its place.
type Value struct {
	Text  string // as on the command line: "a,b" for a list, "63=ignore,94=degraded" for a mapping
	Where string // "--flag", "VARIABLE", "/etc/tandem.yaml:3: flags.x" or a key of Nomad's block; "" = the default

	pairs []pair // of a list (without values) or a mapping; nil = they are in Text
}

// pair is an entry of a mapping.
type pair struct{ key, value string }

func (p pair) String() string {
	if p.value == "" {
		return p.key
	}
	return p.key + "=" + p.value
}

// valueOf is a value with entries.
func valueOf(where string, pairs []pair) Value {
	texts := make([]string, len(pairs))
	for i, p := range pairs {
		texts[i] = p.String()
	}
	return Value{Text: strings.Join(texts, ","), Where: where, pairs: pairs}
}

// entries are those of a mapping.
func (v Value) entries() (pairs []pair) {
	if v.pairs != nil {
		return v.pairs
	}
	for _, item := range v.items() {
		key, value, _ := strings.Cut(item, "=")
		pairs = append(pairs, pair{strings.TrimSpace(key), strings.TrimSpace(value)})
	}
	return pairs
}

// items are those of a list.
func (v Value) items() (items []string) {
	for _, p := range v.pairs {
		items = append(items, p.key)
	}
	if v.pairs == nil {
		for item := range strings.SplitSeq(v.Text, ",") {
			if item = strings.TrimSpace(item); item != "" {
				items = append(items, item)
			}
		}
	}
	return items
}
