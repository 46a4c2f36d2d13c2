package agents

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
)

// labelledAgent is k8s-gpu whose configuration and driver follow labels of its Node.
type labelledAgent struct {
	*agent
	api *kubeapitest.Server
}

func newLabelledAgent(t *testing.T, files map[string]string) *labelledAgent {
	t.Helper()
	l := &labelledAgent{agent: newAgent(t, k8sGPU, "h100x8", nil), api: kubeapitest.Start(t)}
	dir := filepath.Join(l.dir, "configs")
	l.must(os.Mkdir(dir, 0o755))
	for name, text := range files {
		l.must(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	for key, value := range map[string]any{"node_name": draNode, "kube_api": l.api.URL, "config_file_srcdir": dir, "pause_label": config.DefaultPauseLabel} {
		l.settings[key] = value
	}
	return l
}

func (l *labelledAgent) label(name, client string) {
	labels := map[string]string{config.DefaultPauseLabel: client}
	if name != "" {
		labels[config.DefaultConfigLabel] = name
	}
	l.api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: draNode, Labels: labels}})
}

// The label of the node chooses the configuration of a running agent; a bad one leaves what is in force, and one problem names it. While the GPU
// Operator pauses its clients the driver is released.
func TestNodeLabels(t *testing.T) {
	t.Parallel()
	l := newLabelledAgent(t, map[string]string{
		"default": header,
		"shared":  header + "policy:\n  rules:\n    - {select: {index: 0}, use: time-slicing, replicas: 4}\n",
		"broken":  header + "flags: {migStrategy: some}\n",
	})
	l.label("", "true")
	l.startHealthy()
	l.healthy(8, 8)
	opened := l.calls("nvmlInit")

	l.label("shared", "true")
	l.healthy(11, 11)
	if n := l.calls("nvmlInit"); n != opened {
		t.Errorf("the driver was opened %d times more", n-opened)
	}
	l.label("other", "true")
	l.logsTimes(notReloaded, 1)
	l.prints(`node label nvidia.com/device-plugin.config = "other": there is no such configuration`, "inspect")
	l.label("broken", "true")
	l.logsTimes(notReloaded, 2)
	l.prints(`selected by the node label nvidia.com/device-plugin.config = "broken", is invalid`, "inspect")
	l.healthy(11, 11)
	l.stop()

	l.start() // with a bad label
	l.healthy(11, 11)
	l.prints(`configuration "shared" is in force, as before the start`, "inspect")
	l.label("shared", "paused-for-driver-upgrade")
	l.healthy(11, 0)
	l.prints("driver released by quiesce", "inspect")
	l.stop()
	l.start() // in the middle of the upgrade
	l.healthy(11, 0)
	l.label("shared", "true")
	l.healthy(11, 11)
	if !strings.Contains(l.log.String(), "driver opened again, because of a label of the node") {
		t.Error("the log does not name the label")
	}
	l.stop()
}
