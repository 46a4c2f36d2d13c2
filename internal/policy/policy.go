// Package policy reads what a configuration file says about devices: which are offered, under which names, and
// how often each. One file serves both agents; it is that of NVIDIA's k8s-device-plugin with a section more.
package policy

import "github.com/tandem-gpu/tandem/internal/core"

// Orchestrator is whom an agent offers devices to.
type Orchestrator string

// The orchestrators, as "for" in a rule spells them.
const (
	Nomad      Orchestrator = "nomad"
	Kubernetes Orchestrator = "kubernetes"
)

// Result is what a file says to one agent.
type Result struct {
	Policy     core.Policy
	Normalized core.Policy      // Policy without places: equal for two files that mean the same
	MPS        string           // where MPS is first used, as the Key of a core.ConfigError if there is no MPS root; "" = nowhere
	MIG        core.MIGStrategy // flags.migStrategy; "" = the file does not say
	MPSRoot    string           // flags.mpsRoot, an absolute path on the host; "" = the file does not say

	// Warnings are a line for each field that NVIDIA's k8s-device-plugin ignores and that counts here, so that the same
	// file gives other resources: "/etc/tandem.yaml:7: sharing.timeSlicing.resources[0].rename: NVIDIA's ...".
	Warnings []string
	Text     string // of the file, as it was read by ReadFile
}
