package podresources_test

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
	"github.com/tandem-gpu/tandem/test/check"
)

// The record has the pods with devices, by a device plugin or by a claim, with the UIDs that are certain.
func TestRecord(t *testing.T) {
	c := core.DefaultConfig()
	c.MIG = inventory.MIGMixed
	inv := core.Build(coretest.WithMIG(coretest.GPUs(4), 3, "1g.10gb", "1g.10gb"), health.Ledger{}, c).WithoutHost()
	dir := coretest.ShortDir(t)
	p, err := kubelettest.ServePodResources(filepath.Join(dir, "kubelet.sock"))
	check.NoError(t, err)
	defer p.Close()
	for _, name := range []string{"default_one_uid-1", "default_two_uid-2", "default_two_uid-3", "kube-system_agent_uid-4", "default_gone_uid-5", "no-pod"} {
		check.NoError(t, os.MkdirAll(filepath.Join(dir, "logs", name), 0o750))
	}
	p.Hold("default/one", "nvidia.com/gpu.shared", string(coretest.GPU(0))+"::3")
	p.Hold("default/two", "example.com/nic", "mlx5_0")
	for _, claim := range []struct{ driver, device, cdi string }{
		{"gpu.example.com", "a", "example.com/gpu=" + string(coretest.GPU(1))}, // by UUID
		{"gpu.nvidia.com", "gpu-2", "k8s.gpu.nvidia.com/claim=8f1d-gpu-2"},     // by minor number
		{"any", "x", "nvidia.com/gpu=3:1"},                                     // by index
		{"gpu.nvidia.com", "gpu-3-mig-19-0-1", "k8s.gpu.nvidia.com/claim=x"},   // that only NVIDIA's driver numbers
		{"nic.example.com", "gpu-1", "example.com/nic=1"},
		// The driver of this project, by UUID: the kubelet lists with a device the CDI names of those before it.
		{"gpu.nvidia.com", lower(coretest.GPU(2)), "k8s.device-plugin.nvidia.com/gpu=" + string(coretest.GPU(0))},
		{"gpu.nvidia.com", lower(coretest.Instance(3, 0)) + "-s2", "x"},
		{"gpu.nvidia.com", lower(coretest.GPU(1)) + "-sx", "x"},
	} {
		p.Claim("default/two", "claim", claim.driver, claim.device, claim.cdi)
	}
	poller := podresources.New(podresources.Options{Socket: filepath.Join(dir, "kubelet.sock"), Checkpoint: filepath.Join(dir, podresources.CheckpointName), Log: slog.New(slog.DiscardHandler)})
	r := poller.Read(t.Context())
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	got := r.Record(inv, filepath.Join(dir, "logs"))
	one := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "one", Container: "main", ID: "uid-1"}
	two := holders.Work{Orchestrator: holders.Kubernetes, Namespace: "default", Name: "two", Container: "main", Claim: "claim"}
	claimed := func(id gpu.DeviceID) holders.Holder { return holders.Holder{Work: two, API: inventory.DRA, Device: id} }
	nic := two
	nic.Claim = ""
	named := func(namespace, name, uid string) holders.Work {
		return holders.Work{Orchestrator: holders.Kubernetes, Namespace: namespace, Name: name, ID: uid}
	}
	want := holders.Record{
		Complete: true, AllWork: true,
		Work: map[string]holders.Work{
			"uid-1": named("default", "one", "uid-1"), "uid-2": named("default", "two", "uid-2"), "uid-3": named("default", "two", "uid-3"),
			"uid-4": named("kube-system", "agent", "uid-4"),
		},
		Holders: []holders.Holder{
			{Work: one, API: inventory.DevicePlugin, Resource: "nvidia.com/gpu.shared", Unit: inventory.UnitID(coretest.GPU(0)) + "::3", Device: coretest.GPU(0)},
			{Work: nic, API: inventory.DevicePlugin, Resource: "example.com/nic", Unit: "mlx5_0", Device: "mlx5_0"}, // of no device of ours: without effect
			claimed(coretest.GPU(1)), claimed(coretest.GPU(2)), claimed(coretest.Instance(3, 1)),
			claimed(coretest.GPU(2)), claimed(coretest.Instance(3, 0)),
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := r.Record(inv, filepath.Join(dir, "none")); len(got.Work) > 0 || got.Holders[0].Work.ID != "" || got.Holders[0].Work.Name != "one" {
		t.Errorf("without the folder of logs: %+v", got)
	}
	shared := string(coretest.GPU(0)) + "::3"
	check.NoError(t, kubelettest.WriteCheckpoint(dir, kubelettest.Entry("uid-8", "init", "nvidia.com/gpu.shared", shared), kubelettest.Entry("uid-9", "main", "nvidia.com/gpu.shared", shared)))
	if got := poller.Read(t.Context()).Record(inv, ""); got.Holders[0].Work.ID != "uid-9" {
		t.Errorf("the UID that the kubelet's checkpoint has of the container: %+v", got.Holders[0])
	}
	p.Fail(errors.New("too many requests"))
	if r := poller.Read(t.Context()); r.Err == nil || r.Stale(t.Context()) == nil {
		t.Error("no error, although the kubelet returned one")
	}
}

func lower(id gpu.DeviceID) string { return strings.ToLower(string(id)) }

// The limit of a container is that with which the kubelet created it, by its checkpoint.
func TestRecordedLimit(t *testing.T) {
	shares := inventory.UnitID(coretest.GPU(0)) + "::1"
	r := podresources.Reading{
		Answer:     podresources.Answer{Devices: []podresources.Device{{Pod: "default/one", Container: "main", Resource: "nvidia.com/gpu.shared", ID: string(shares)}}},
		Checkpoint: podresources.Checkpoint{Devices: []podresources.CheckpointDevice{{PodUID: "uid-1", Container: "main", Resource: "nvidia.com/gpu.shared", ID: string(shares), MemoryLimit: 20 << 30}}},
	}
	got := r.Record(core.Build(coretest.GPUs(1), health.Ledger{}, core.DefaultConfig()).WithoutHost(), "").Holders
	if len(got) != 1 || got[0].Memory != 20<<30 || got[0].Work.ID != "uid-1" {
		t.Errorf("%+v", got)
	}
}
