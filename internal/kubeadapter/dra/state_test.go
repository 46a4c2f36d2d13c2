package dra

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/cdi/specfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// mpsRig is a rig with a GPU that four MPS clients share, and a prepared claim of one, which has a specification of its own.
func mpsRig(t *testing.T) (r *rig, answer []*dra.Device, spec string) {
	t.Helper()
	r = newRig(t, build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.MPS, 4))))
	c := newClaim("a", result(coretest.GPU(0), func(r *kubeapi.DeviceRequestAllocationResult) { r.ShareID = "share" }))
	c.Status.Allocation.Devices.Config = []kubeapi.DeviceAllocationConfiguration{{Source: "FromClaim", Opaque: &kubeapi.OpaqueConfiguration{
		Driver: "gpu.nvidia.com", Parameters: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{"strategy":"MPS","mpsConfig":{"defaultActiveThreadPercentage":20}}}`),
	}}}
	r.api.put(c)
	return r, r.mustPrepare("a"), filepath.Join(r.dir, "cdi", "k8s.device-plugin.nvidia.com-claim_uid-a.json")
}

// A client of an MPS control daemon gets a second CDI name, which has the pipe of the daemon and the limits. Its specification is
// restored when it or its folder is removed, without a call, by a new agent, and by a repeated Prepare; and removed by Unprepare.
func TestSpecificationOfAClaim(t *testing.T) {
	r, answer, spec := mpsRig(t)
	names := answer[0].GetCdiDeviceIds()
	if want := []string{"k8s.device-plugin.nvidia.com/gpu=" + string(coretest.GPU(0)), "k8s.device-plugin.nvidia.com/claim=uid-a-0"}; !slices.Equal(names, want) {
		t.Fatalf("%q", names)
	}
	text, err := os.ReadFile(spec)
	r.must(err)
	r.must(specfile.Validate(text))
	for _, want := range []string{
		`"CUDA_MPS_PIPE_DIRECTORY=/mps/nvidia.com/gpu.mps/pipe"`, `"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=20"`,
		`"hostPath":"/run/nvidia/mps/nvidia.com/gpu.mps/pipe"`, `"hostPath":"/run/nvidia/mps/shm","containerPath":"/dev/shm"`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("%s has no %s", text, want)
		}
	}
	restored := func() bool { now, err := os.ReadFile(spec); return err == nil && string(now) == string(text) }
	foreign := filepath.Join(r.dir, "cdi", "k8s.gpu.nvidia.com-claim_uid-a.yaml")
	for name, damage := range map[string]func(){
		"file removed":   func() { r.must(os.Remove(spec)) },
		"file changed":   func() { r.must(os.WriteFile(spec, []byte("{}"), 0o644)) },
		"folder removed": func() { r.must(os.Rename(filepath.Dir(spec), filepath.Join(r.dir, "removed"))) },
		"agent restarted": func() {
			r.stop()
			r.must(os.Rename(filepath.Dir(spec), filepath.Join(r.dir, "removed before the start")))
			r.start()
		},
	} {
		damage()
		r.await(name+": specification", restored)
	}
	r.must(os.WriteFile(foreign, nil, 0o644))
	unknown := filepath.Join(r.dir, "cdi", "k8s.device-plugin.nvidia.com-claim_uid-old.json")
	r.must(os.WriteFile(unknown, text, 0o644))
	r.await("removal of a specification without a claim", func() bool { _, err := os.Lstat(unknown); return err != nil })

	r.change = append(r.change, func(a *Adapter) { a.limits.specsEvery, a.specs.folder = time.Hour, filepath.Join(r.dir, "cdi2") })
	r.start()
	r.await("specification in another folder", func() bool { _, err := os.Stat(r.adapter.specs.path("uid-a")); return err == nil })
	r.must(r.unprepare("a"))
	r.wantFile(r.adapter.specs.path("uid-a"), false)
	r.wantFile(foreign, true)
}

// A process that ends between two steps leaves a state from which the next Prepare completes, and the next Unprepare cleans up.
func TestCrashBetweenSteps(t *testing.T) {
	for name, crash := range map[string]func(r *rig, spec string, c prepared.Claim){
		"record started":        func(r *rig, spec string, c prepared.Claim) { r.must(os.Remove(spec)) },
		"specification written": func(r *rig, spec string, c prepared.Claim) {},
		"temporary files": func(r *rig, spec string, c prepared.Claim) {
			r.must(os.WriteFile(filepath.Join(filepath.Dir(spec), "."+filepath.Base(spec)+"123"), nil, 0o600))
		},
		"Unprepare: no spec":        func(r *rig, spec string, c prepared.Claim) { r.must(os.Remove(spec)) },
		"nothing but specification": func(r *rig, spec string, c prepared.Claim) { r.must(os.Remove(r.adapter.store.Load().Path(c.UID))) },
	} {
		for _, next := range []string{"prepare", "unprepare"} {
			t.Run(name+", "+next, func(t *testing.T) {
				r, want, spec := mpsRig(t)
				c := r.record("a")
				r.stop()
				if strings.HasPrefix(name, "Unprepare") {
					c.State = prepared.Complete
				} else {
					c.State = prepared.Started
				}
				store, err := prepared.Open(r.adapter.claimsDir(), boot, nil)
				r.must(err)
				r.must(store.Put(c))
				crash(r, spec, c)
				r.start()
				r.await("records", r.adapter.isLoaded)
				if name != "nothing but specification" {
					r.wantHolder(0, "claim default/a")
				}
				if next == "prepare" {
					if got := r.mustPrepare("a"); len(got) != 1 || got[0].String() != want[0].String() {
						t.Errorf("%v, want %v", got, want)
					}
					if text, err := os.ReadFile(spec); err != nil || specfile.Validate(text) != nil {
						t.Errorf("%s, %v", text, err)
					}
				}
				r.must(r.unprepare("a"))
				r.await("an empty folder", func() bool { left, _ := os.ReadDir(filepath.Dir(spec)); return len(left) == 0 })
				r.wantRecord("a", "")
			})
		}
	}
}

// After a reboot records hold nothing, Prepare does everything anew, and Unprepare removes the record.
func TestRecordsOfAnotherBoot(t *testing.T) {
	r, _, spec := mpsRig(t)
	r.stop()
	r.must(os.Rename(filepath.Dir(spec), filepath.Join(r.dir, "removed")))
	r.change = append(r.change, func(a *Adapter) { a.opts.BootID = "boot-2" })
	r.start()
	r.await("records", r.adapter.isLoaded)
	r.wantHolder(0, "free")
	r.src.Set(build(coretest.GPUs(1), health.Ledger{}, config())) // now exclusive
	r.api.put(newClaim("b", result(coretest.GPU(0))))
	r.mustPrepare("b")
	r.mustRefuse("a", "allocated as a share") // allocated for another sharing
	r.must(r.unprepare("b"))
	r.src.Set(build(coretest.GPUs(1), health.Ledger{}, config(shared(inventory.MPS, 4))))
	r.mustPrepare("a")
	r.wantFile(spec, true)
	if c := r.record("a"); c.BootID != "boot-2" || c.State != prepared.Complete {
		t.Errorf("%+v", c)
	}
	r.must(r.unprepare("a"))
}

// What is expected to end soon is waited for: the first reading of the driver, and maintenance. Its end is noticed at once; the text of
// an error has what was waited for.
func TestPrepareWaits(t *testing.T) {
	ready := build(coretest.GPUs(1), health.Ledger{}, config())
	taken := inventory.Ownership{GPUs: []inventory.GPUOwner{{GPU: coretest.GPU(0), API: inventory.DRA, Local: true, Taken: inventory.Proof}}}
	moving := inventory.Ownership{GPUs: []inventory.GPUOwner{{GPU: coretest.GPU(0), API: inventory.DRA, Local: true, Pending: "to dra"}}}
	for name, c := range map[string]struct {
		inv  *inventory.Allocatable
		text string
	}{
		"before the first reading": {core.Build(gpu.NoDriver(gpu.DriverPending, "not asked yet"), health.Ledger{}, config()).WithoutHost(), "the driver has not answered yet"},
		"maintenance":              {maintained(t), "unknown: maintenance (driver released by quiesce"},
		"a GPU that moves":         {ready.WithHost(inventory.Host{CDI: ready.CDI(), Ownership: moving}, inventory.OverlapRefuse), "unhealthy: moves (to dra)"},
		"a GPU that is proved":     {ready.WithHost(inventory.Host{CDI: ready.CDI(), Ownership: taken}, inventory.OverlapRefuse), "unknown: withheld for a proof for a short time"},
		"no hook program":          {withoutHooks(ready), "unhealthy: no CDI definition (hook program nvidia-ctk is not on the host"},
		"no driver":                {core.Build(gpu.NoDriver(gpu.DriverFailed, "RM version mismatch"), health.Ledger{}, config()).WithoutHost(), "the driver is not usable: RM version mismatch"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.inv, func(a *Adapter) { a.limits.call = 500 * time.Millisecond })
			r.api.put(newClaim("a", result(coretest.GPU(0))))
			r.await("an error with the cause", func() bool {
				_, err := r.prepareOne("a")
				return err != nil && strings.Contains(err.Error(), "(waited ") && strings.Contains(err.Error(), c.text)
			})
			r.change = nil
			r.start()
			calls := r.api.count()
			done := make(chan error, 1)
			go func() { _, err := r.prepareOne("a"); done <- err }()
			r.await("a claim that was read", func() bool { return r.api.count() > calls })
			r.src.Set(ready)
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// withoutHooks is an inventory on a node where no container with a device starts.
func withoutHooks(inv *inventory.Allocatable) *inventory.Allocatable {
	spec := *inv.CDI()
	spec.NoStart = "hook program nvidia-ctk is not on the host"
	return inv.WithHost(inventory.Host{CDI: &spec}, inventory.OverlapRefuse)
}

// maintained is the inventory of a GPU during maintenance.
func maintained(t *testing.T) *inventory.Allocatable {
	t.Helper()
	cfg := config()
	s := core.NewState(cfg).Read(cfg, time0, coretest.GPUs(1))
	s = s.EnterMaintenance(cfg, time0, health.Maintenance{Since: time0})
	return withCDI(s.Allocatable, coretest.GPUs(1))
}

// Unprepare of a claim that is not prepared succeeds. While a disk fails it does not, and then it does.
func TestUnprepare(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(1), health.Ledger{}, config()))
	r.must(r.unprepare("unknown"))
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.mustPrepare("a")
	path := r.adapter.store.Load().Path(uidOf("a"))
	r.must(os.Rename(path, path+".away"))
	r.must(os.MkdirAll(filepath.Join(path, "full"), 0o755)) // can't be removed
	if err := r.unprepare("a"); err == nil || !strings.Contains(err.Error(), "prepared claim not removed") {
		t.Error(err)
	}
	r.wantHolder(0, "claim default/a")
	r.must(os.RemoveAll(path))
	r.must(os.Rename(path+".away", path))
	r.must(r.unprepare("a"))
	r.wantHolder(0, "free")
	answer, err := dra.NewDRAPluginClient(r.conn).NodeUnprepareResources(r.ctx, &dra.NodeUnprepareResourcesRequest{Claims: []*dra.Claim{{Uid: "../agent"}}})
	if err != nil || !strings.Contains(answer.GetClaims()["../agent"].GetError(), "is not the UID of a claim") {
		t.Error(answer, err)
	}
}

// A call that hangs on a disk ends in time, with what it waits for, and delays no other claim.
func TestHangingDisk(t *testing.T) {
	r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()), func(a *Adapter) { a.limits.call, a.limits.grace = 300*time.Millisecond, 10*time.Millisecond })
	r.api.put(newClaim("a", result(coretest.GPU(0))))
	r.api.put(newClaim("b", result(coretest.GPU(1))))
	release, err := r.adapter.locks.lock(context.Background(), uidOf("a")) // as the goroutine has that hangs
	r.must(err)
	defer release()
	for _, call := range []func() error{func() error { _, err := r.prepareOne("a"); return err }, func() error { return r.unprepare("a") }} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "an earlier call for this claim has not ended") || !strings.Contains(err.Error(), "waited") {
			t.Error(err)
		}
	}
	r.await("another claim", func() bool { _, err := r.prepareOne("b"); return err == nil }) // a busy machine may need several tries
	r.await("its end", func() bool { return r.unprepare("b") == nil })
}
