package policy

import (
	"fmt"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Compile compiles the sections of a document for the agent of an orchestrator; root has the keys of the document. It adds
// every problem to the document, and then returns the zero Result.
func Compile(d *document.Document, root document.Fields, to Orchestrator) Result {
	before := d.Problems()
	c := &compiler{
		doc: d, to: to, selectedBy: map[string]string{}, pools: []string{inventory.DefaultPool},
		sharedBy: map[string]value{}, sharesOf: map[string][]inventory.Share{},
	}
	c.policy.Limits = readLimits(root.At("memoryLimits"))
	c.readPolicy(root.At("policy"))
	c.readResources(root.At("resources"))
	c.readSharing(root.At("sharing"))
	prove := c.readProve(root.At("prove"))
	reset, program, pause := c.readReset(root.At("reset"))
	c.unknownPools()
	c.findConflicts(d.Problems() == before)
	if d.Problems() > before {
		return Result{}
	}
	return Result{
		Policy: c.policy, Normalized: normalized(c.policy), Prove: prove, Reset: reset, ResetProgram: program, ResetPause: pause,
		MPS: c.mps, OnePerRequest: c.onePerRequest, Notes: c.notes, Warnings: c.sortedWarnings(),
	}
}

// value and fields are those of a document.
type (
	value  = document.Value
	fields = document.Fields
)

// fieldsOf are the values of a mapping that has these keys.
func fieldsOf(v value, keys []schema.Key) fields { return v.Fields(schema.Names(keys)...) }

// compiler is the state of one compilation.
type compiler struct {
	doc    *document.Document
	to     Orchestrator
	policy inventory.Policy

	mps           string            // the first place that uses MPS
	onePerRequest string            // see Result
	selectedBy    map[string]string // devices that an earlier rule selects without a condition, and the place of that rule
	everything    string            // the place of the rule that selects every device
	pools         []string          // the pools, beside those of MIG profiles, that devices have before they are shared
	named         []value           // names of resources in "sharing"
	suffix        string            // the longest suffix that core appends, for rules that share without a name

	sharedBy    map[string]value // the item in "sharing" by pool
	sharesOf    map[string][]inventory.Share
	renamesGPUs bool // "resources" gives full GPUs another pool

	notes    []string // see Result
	warnings []warning
}

// problems is the number of problems found so far.
func (c *compiler) problems() int { return c.doc.Problems() }

// at is the place of a value in reasons and warnings of a running agent: "tandem.yaml:12: policy.rules[0]". It has no
// folder: two agents may read one file under two paths, and their texts are the same.
func (c *compiler) at(v value) string { return fmt.Sprintf("%s: %s", c.line(v), v.Path()) }

// line is the line of a value: "tandem.yaml:12".
func (c *compiler) line(v value) string {
	return fmt.Sprintf("%s:%d", filepath.Base(c.doc.Path), v.Line())
}

// noteMPS records the first place that uses MPS.
func (c *compiler) noteMPS(v value, mode inventory.SharingMode) {
	if mode == inventory.MPS && c.mps == "" {
		c.mps = v.Where()
	}
}

// noteOnePerRequest records the first place that refuses requests for several units. v is "failRequestsGreaterThanOne".
func (c *compiler) noteOnePerRequest(v value, s inventory.Sharing) {
	if s.Mode == inventory.TimeSlicing && s.OnePerRequest && c.onePerRequest == "" {
		c.onePerRequest = v.Where()
	}
}
