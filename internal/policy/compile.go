package policy

import (
	"fmt"
	"path/filepath"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
)

// Compile says what the sections of a file mean to an agent of the orchestrator: Policy, Shape, MPS and Warnings of a
// Result. Every problem is returned at once: errors.Join of *core.ConfigError, each with line and path of the key.
func Compile(f configfile.File, to Orchestrator) (Result, error) {
	c := newCompiler(f, to, true)
	if err := c.err(); err != nil {
		return Result{}, err
	}
	return Result{Policy: c.policy, Normalized: newCompiler(f, to, false).policy, MPS: c.mps, Warnings: c.sortedWarnings()}, nil
}

// Sections are the keys of a file that Compile reads, to be known as of kind configfile.Section.
func Sections() []string { return []string{"resources", "sharing", "policy"} }

// compiler makes a policy of what a file says.
type compiler struct {
	reading
	to     Orchestrator
	places bool // what is said of the policy names lines of the file
	policy core.Policy
	mps    string            // where MPS is first used
	taken  map[string]string // devices that an earlier rule certainly selects, and which rule
	rest   string            // the rule that selects everything
	pools  []string          // that a device may be in before it is shared, beside those of MIG profiles
	named  []value           // resources that are to be shared
	suffix string            // the longest that core appends to names, by rules that share without a name

	warnings []warning // of what NVIDIA's plugin ignores

	sharedAt    map[string]value // where it is said how a pool is shared
	sharesOf    map[string][]core.Share
	renamesGPUs bool // full GPUs have names by their model
}

func newCompiler(f configfile.File, to Orchestrator, places bool) *compiler {
	c := &compiler{
		reading: reading{file: f.Path}, to: to, places: places, taken: map[string]string{}, pools: []string{core.DefaultPool},
		sharedAt: map[string]value{}, sharesOf: map[string][]core.Share{},
	}
	section := func(name string) value {
		v := value{reading: &c.reading, node: f.Sections[name], path: name}
		if v.node != nil {
			v.line = line(v.node)
		}
		return v
	}
	c.rules(section("policy"))
	c.resources(section("resources"))
	c.sharing(section("sharing"))
	c.strangers()
	c.clashes(len(c.errs) == 0)
	return c
}

// line is where a section begins.
func line(n *yaml.Node) int {
	if len(n.Content) > 0 {
		return n.Content[0].Line
	}
	return n.Line
}

// place names a value in what is said while the agent runs: "tandem.yaml:12: policy.rules[0]". Two agents may
// see one file under two paths, and say the same of it.
func (c *compiler) place(v value) string {
	if !c.places {
		return v.path
	}
	return fmt.Sprintf("%s: %s", c.at(v), v.path)
}

// at is the line of a value, for reasons: "tandem.yaml:12".
func (c *compiler) at(v value) string {
	if !c.places {
		return ""
	}
	return fmt.Sprintf("%s:%d", filepath.Base(c.file), v.line)
}

// uses notes where MPS is used.
func (c *compiler) uses(v value, mode core.SharingMode) {
	if mode == core.MPS && c.mps == "" {
		c.mps = v.where()
	}
}
