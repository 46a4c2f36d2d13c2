package nodelabels

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
)

// withObject starts the writer of an agent in the pod p, which writes an object and no file.
func (f *fixture) withObject(s *kubeapitest.Server, pod string) {
	f.stop()
	api, err := kubeapi.New(kubeapi.Options{Address: s.URL, Dial: s.Dial})
	check.NoError(f.t, err)
	f.writer = New(Options{API: api, Node: "n1", Namespace: "gpu", Pod: pod, Sys: f.t.TempDir(), MIG: f.config.MIG, Log: slog.New(slog.NewTextHandler(&f.log, nil))})
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan struct{})
	go func() { f.writer.Run(ctx, f); close(done) }()
	f.stop = func() { cancel(); <-done }
	synctest.Wait()
}

func (f *fixture) writes(s *kubeapitest.Server) (n int) {
	for _, r := range s.Requests() {
		if r.Verb == "create" || r.Verb == "update" {
			n++
		}
	}
	return n
}

// The object is that of gpu-feature-discovery: name, label, owners, labels. It follows the devices and its own pod, and is written for changes only.
func TestNodeFeature(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := kubeapitest.NewInMemory()
		defer s.Close()
		daemonSet := kubeapi.OwnerReference{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "agents", UID: "d"}
		for _, name := range []string{"p1", "p2"} {
			s.PutPod(kubeapi.ObjectMeta{Namespace: "gpu", Name: name, UID: "uid-" + name, OwnerReferences: []kubeapi.OwnerReference{daemonSet}})
		}
		f := newFixture(t)
		defer func() { f.stop() }()
		s.SetDown(true)
		f.withObject(s, "p1")
		f.read(coretest.GPUs(8))
		if got := problem.Lines(f.writer.Problems()); len(got) != 1 || !strings.Contains(got[0], "node labels: NodeFeature gpu/nvidia-features-for-n1") {
			t.Errorf("without the API server: %q", got)
		}
		s.SetDown(false)
		time.Sleep(2 * retryMost)
		object, _ := s.NodeFeature("gpu", "nvidia-features-for-n1")
		if o := object.Metadata.OwnerReferences; len(o) != 2 || o[0].UID != "d" || !*o[0].Controller || o[1].Kind != "Pod" || o[1].UID != "uid-p1" {
			t.Errorf("owners %+v", o)
		}
		if l := object.Spec.Labels; l[gpuResource+".count"] != "8" || l[timestampLabel] == "" || object.Metadata.Labels["nfd.node.kubernetes.io/node-name"] != "n1" {
			t.Errorf("object %+v", object)
		}
		if got := problem.Lines(f.writer.Problems()); got != nil {
			t.Errorf("%q", got)
		}
		time.Sleep(time.Hour)
		if n := f.writes(s); n != 1 {
			t.Errorf("%d writes", n)
		}

		f.withObject(s, "p2")
		object, _ = s.NodeFeature("gpu", "nvidia-features-for-n1")
		if o := object.Metadata.OwnerReferences; len(o) != 2 || o[1].UID != "uid-p2" || f.writes(s) != 2 {
			t.Errorf("owners of the next pod %+v, %d writes", o, f.writes(s))
		}
		f.states.Store(core.NewState(f.config).Read(f.config, time.Now(), gpu.NewSnapshot(gpu.Snapshot{Driver: coretest.GPUs(2).Driver})))
		synctest.Wait()
		if object, _ = s.NodeFeature("gpu", "nvidia-features-for-n1"); len(object.Spec.Labels) != 0 {
			t.Errorf("labels without GPUs %v", object.Spec.Labels)
		}
	})
}

// A node without GPUs has the label that gpu-feature-discovery writes there; without a timestamp if that is wanted.
func TestVGPUWithoutDriver(t *testing.T) {
	sys, path := t.TempDir(), filepath.Join(t.TempDir(), "gfd")
	check.NoError(t, os.MkdirAll(filepath.Join(sys, "bus/pci/devices/0000:00:00.0"), 0o755))
	write := func(noTimestamp bool) string {
		w := New(Options{Path: path, Sys: sys, NoTimestamp: noTimestamp, Log: slog.New(slog.DiscardHandler)})
		cfg := core.DefaultConfig()
		check.NoError(t, w.WriteOnce(t.Context(), core.NewState(cfg).Read(cfg, time.Now(), gpu.NoDriver(gpu.DriverAbsent, "none"))))
		text, _ := os.ReadFile(path)
		return string(text)
	}
	if got := write(false); !strings.HasPrefix(got, "nvidia.com/gfd.timestamp=") || !strings.HasSuffix(got, "\nnvidia.com/vgpu.present=false\n") {
		t.Errorf("%q", got)
	}
	if got := write(true); got != "nvidia.com/vgpu.present=false\n" {
		t.Errorf("%q", got)
	}
	function := filepath.Join(sys, "bus/pci/devices/0000:01:00.0")
	check.NoError(t, os.MkdirAll(function, 0o755))
	for name, text := range map[string]string{"vendor": "0x10de\n", "class": "0x030200\n", "config": strings.Repeat("\x00", 64)} {
		check.NoError(t, os.WriteFile(filepath.Join(function, name), []byte(text), 0o644))
	}
	if got := write(false); got != "" {
		t.Errorf("a GPU whose configuration space can't be read: %q", got)
	}
}
