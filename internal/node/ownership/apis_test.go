package ownership

import (
	"slices"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// A process serves the API of its settings first, DRA only if that is in the settings or a GPU needs it, and none for an agent that is not known.
func TestServedBy(t *testing.T) {
	const plugin, dra, nomad = inventory.DevicePlugin, inventory.DRA, inventory.Nomad
	for _, tc := range []struct {
		agent      string
		configured inventory.API
		target     inventory.API // of a GPU
		want       []inventory.API
	}{
		{KubernetesAgent, plugin, nomad, []inventory.API{plugin}},
		{KubernetesAgent, "", nomad, []inventory.API{plugin}},
		{KubernetesAgent, plugin, dra, []inventory.API{plugin, dra}},
		{KubernetesAgent, dra, nomad, []inventory.API{dra, plugin}},
		{NomadAgent, plugin, dra, []inventory.API{nomad}},
		{"another", plugin, dra, nil},
	} {
		dir := t.TempDir()
		check.NoError(t, Write(dir, File{GPUs: map[gpu.DeviceID]Entry{"GPU-1": {Target: tc.target}}}))
		if got := servedBy(tc.agent, tc.configured, dir); !slices.Equal(got, tc.want) {
			t.Errorf("%s, configured %q, target %s: %v, want %v", tc.agent, tc.configured, tc.target, got, tc.want)
		}
	}
}
