// Package policy compiles the sections "resources", "sharing" and "policy" of a configuration file into an inventory.Policy, "memoryLimits" into its part of that, "prove" into a proof.Policy, and "reset" into a reset.Policy. The
// first two are those of NVIDIA's k8s-device-plugin (api/config/v1), with its meaning unless a warning states otherwise;
// "policy" is an extension.
package policy

import (
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/proof"
	"github.com/tandem-gpu/tandem/internal/core/reset"
)

// Orchestrator is the one for which an agent offers devices.
type Orchestrator string

// The orchestrators, as the key "for" of a rule spells them.
const (
	Nomad      Orchestrator = "nomad"
	Kubernetes Orchestrator = "kubernetes"
)

// Result is what a file requests from the agent of one orchestrator.
type Result struct {
	Policy     inventory.Policy
	Normalized inventory.Policy // Policy without lines: equal for two files with the same meaning
	Prove      proof.Policy     // the zero value = nothing is proved
	Reset      reset.Policy     // the zero value = nothing is reset but by a person
	MPS        string           // the first place that uses MPS, as the Key of a setting.Error; "" = none

	// OnePerRequest is the first place that refuses requests for several units of devices that are shared by time-slicing; "" = none. (By
	// MPS they always are.)
	OnePerRequest string

	ResetProgram string      // path of nvidia-smi, for nomad-gpu; "" = where the driver has it
	ResetPause   reset.Pause // the programs that watch GPUs, and are stopped for a reset by nomad-gpu
	Notes        []string    // a line for each key that has no effect for this agent

	// Warnings has a line for each field that NVIDIA's k8s-device-plugin ignores and that has an effect here, so that the
	// same file gives other resources: "/etc/tandem.yaml:7: sharing.timeSlicing.resources[0].rename: NVIDIA's ...".
	Warnings []string
}

// normalized is a policy without the lines of the file, so that a policy that moved within the file is equal.
func normalized(p inventory.Policy) inventory.Policy {
	p.Include, p.Rules, p.Names, p.Shares = slices.Clone(p.Include), slices.Clone(p.Rules), slices.Clone(p.Names), slices.Clone(p.Shares)
	for i := range p.Include {
		withoutLine(&p.Include[i])
	}
	for i := range p.Rules {
		withoutLine(&p.Rules[i].Select)
		p.Rules[i].NotOffered, _, _ = strings.Cut(p.Rules[i].NotOffered, by)
	}
	for i := range p.Names {
		withoutLine(&p.Names[i].Select)
	}
	for i := range p.Shares {
		withoutLine(&p.Shares[i].Select)
	}
	return p
}

// withoutLine leaves the path in "tandem.yaml:12: policy.rules[0].select".
func withoutLine(s *inventory.Selector) { s.At = s.At[strings.LastIndex(s.At, " ")+1:] }
