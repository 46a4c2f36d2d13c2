package ownership

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Names of the agents.
const (
	KubernetesAgent = "k8s-gpu"
	NomadAgent      = "nomad-gpu"
)

// agents are the agents of a node with the APIs through which each can offer devices, in the order in which they are shown.
var agents = []struct {
	name string
	apis []inventory.API
}{
	{KubernetesAgent, []inventory.API{inventory.DevicePlugin, inventory.DRA}},
	{NomadAgent, []inventory.API{inventory.Nomad}},
}

// Agents are the names of all agents.
func Agents() (names []string) {
	for _, a := range agents {
		names = append(names, a.name)
	}
	return names
}

// APIs are all APIs.
func APIs() (all []inventory.API) {
	for _, a := range agents {
		all = append(all, a.apis...)
	}
	return all
}

// AgentOf returns the agent that offers devices through an API; "" for another value.
func AgentOf(api inventory.API) string {
	for _, a := range agents {
		if slices.Contains(a.apis, api) {
			return a.name
		}
	}
	return ""
}

// servedBy are the APIs that a process of an agent would serve, that of its settings first; none for an agent that is not in the table. DRA,
// which needs rights of its own, is served only if it is in the settings or if a GPU needs it.
func servedBy(agent string, configured inventory.API, stateDir string) (apis []inventory.API) {
	for _, a := range agents {
		if a.name == agent {
			apis = slices.Clone(a.apis)
		}
	}
	apis = slices.DeleteFunc(apis, func(a inventory.API) bool {
		return a == inventory.DRA && a != configured && !Needs(stateDir, a)
	})
	if i := slices.Index(apis, configured); i > 0 {
		apis[0], apis[i] = apis[i], apis[0]
	}
	return apis
}

// Recorded reports whether an agent has ever recorded what it offers on this node.
func Recorded(stateDir, agent string) bool {
	_, err := os.Stat(filepath.Join(stateDir, FolderName, agent+".json"))
	return err == nil
}
