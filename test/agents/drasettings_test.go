package agents

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// With device plugins slices of an earlier run with the API dra are deleted, if an operator has configured Kubernetes' API; those of another
// driver of this name stay. Without that the API is not called.
func TestLeftoverSlicesAreDeleted(t *testing.T) {
	t.Parallel()
	api := kubeapitest.Start(t)
	slice := func(name string) {
		api.PutSlice(kubeapitest.Slice{Metadata: kubeapi.ObjectMeta{Name: name}, Spec: kubeapi.ResourceSliceSpec{
			Driver: resourceslice.Driver, NodeName: draNode, Pool: kubeapi.ResourcePool{Name: draNode, ResourceSliceCount: 1},
		}})
	}
	prefix := publisher.NamePrefix(draNode, resourceslice.Driver)
	slice(prefix + "0")
	slice(prefix + "1")
	slice("00d4-gpu.nvidia.com-node-1-x7f2p")
	a := newAgent(t, k8sGPU, "t4", map[string]any{"node_name": draNode})
	a.start()
	a.healthy(1, 1)
	a.stop()
	if n := len(api.Requests()); n > 0 {
		t.Errorf("%d requests without settings for them", n)
	}
	api.Fail("delete", 1, kubeapitest.Failure{Code: 503, Message: "try later"})
	a.settings["kube_api"] = api.URL
	a.start()
	a.await("the end of the slices", func() bool {
		names := []string{}
		for _, s := range api.Slices() {
			names = append(names, s.Metadata.Name)
		}
		return slices.Equal(names, []string{"00d4-gpu.nvidia.com-node-1-x7f2p"})
	})
	a.healthy(1, 1)
	a.stop()
}

// What the API dra needs of the environment is named at once, with what it can't be combined with; a file is valid without the environment.
func TestDRASettingsAreChecked(t *testing.T) {
	t.Parallel()
	a := newAgentWithFile(t, "t4", header+"api: dra\nflags: {plugin: {deviceListStrategy: [envvar]}}\n")
	run := func(args ...string) (string, bool) {
		cmd := exec.CommandContext(t.Context(), a.binary, args...)
		cmd.Env = []string{"PATH=/usr/bin:/bin"}
		out, err := cmd.CombinedOutput()
		return string(out), err == nil
	}
	out, ok := run("--config-file="+a.file(), "--http-address=")
	for _, want := range []string{"--node-name", "--kube-api", "KUBERNETES_SERVICE_HOST", "flags.plugin.deviceListStrategy"} {
		if ok || !strings.Contains(out, want) {
			t.Errorf("%s is not named:\n%s", want, out)
		}
	}
	a.useFile(header + "api: dra\n")
	if out, ok := run("validate", a.file()); !ok || !strings.Contains(out, "the agent also takes --node-name or NODE_NAME") {
		t.Errorf("%v:\n%s", ok, out)
	}
}
