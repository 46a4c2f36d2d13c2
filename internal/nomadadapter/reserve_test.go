package nomadadapter

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/plugins/device"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/check"
)

func deviceNode(path, host string) *device.DeviceSpec {
	return &device.DeviceSpec{TaskPath: path, HostPath: host + path, CgroupPerms: "rw"}
}

// A reservation has each GPU once, in any order of the IDs, and several shares of a GPU are that GPU. The source gets its
// devices.
func TestReserve(t *testing.T) {
	for name, tc := range map[string]struct {
		inv *inventory.Allocatable
		ids [][]string
	}{
		"exclusive": {nodeInventory(coretest.GPUs(4)), [][]string{{gpuID(1), gpuID(2)}, {gpuID(2), gpuID(1)}, {gpuID(2), gpuID(1), gpuID(2)}}},
		"shares":    {sharedGPUs(3, 4), [][]string{{shareID(1, 0), shareID(2, 3)}, {shareID(2, 0), shareID(1, 1), shareID(2, 1), shareID(1, 3)}, {shareID(2, 2), shareID(2, 2), shareID(1, 0)}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, tc.inv)
			s.mustConfigure(t, map[string]any{"dev_root": "/driver/"})
			p := nomadtest.Serve(t, s.Plugin)
			for i, ids := range tc.ids {
				want := &device.ContainerReservation{
					Envs: map[string]string{
						"NVIDIA_VISIBLE_DEVICES": gpuID(1) + "," + gpuID(2),
						"TANDEM_GPU_NODES":       "/dev/nvidia-uvm:/dev/nvidia1:/dev/nvidia2:/dev/nvidiactl",
					},
					Devices: []*device.DeviceSpec{
						deviceNode("/dev/nvidia-uvm", "/driver"), deviceNode("/dev/nvidia-uvm-tools", "/driver"),
						deviceNode("/dev/nvidia1", "/driver"), deviceNode("/dev/nvidia2", "/driver"), deviceNode("/dev/nvidiactl", "/driver"),
					},
				}
				got, err := p.Reserve(ids)
				check.NoError(t, err)
				checkEqual(t, fmt.Sprint(ids), want, got)
				if r := s.Source.reserved[i]; len(r) != 2 || r[0].ID != coretest.GPU(1) || r[1].ID != coretest.GPU(2) {
					t.Errorf("%v: the source got %v", ids, r)
				}
			}
		})
	}
}

// A task with shares whose memory is limited gets no variable of NVIDIA's hook: those of a CDI device count, which it gets only by an injection with CDI, with what
// all its shares of a GPU have. Without CDI the agent limits the task's group, on each GPU to another value. Nothing is given out that can't be limited.
func TestReserveLimited(t *testing.T) {
	const kind = "nomad.device-plugin.nvidia.com/"
	machine := withDetails(coretest.GPUs(2))
	host := inventory.Host{
		CDI:    &inventory.CDI{Kind: kind + "gpu", LimitKind: kind + "memory-limit", Defined: []gpu.DeviceID{coretest.GPU(0), coretest.GPU(1)}},
		Limits: &inventory.Limits{Backend: "misc", Withheld: map[gpu.DeviceID]inventory.LimitMissing{coretest.GPU(0): {}, coretest.GPU(1): {}}},
	}
	withheld := host
	withheld.Limits = &inventory.Limits{Withheld: map[gpu.DeviceID]inventory.LimitMissing{coretest.GPU(0): {Reason: health.ReasonNoLimit, Detail: "driver 580.95.05: want 615 or newer"}}}
	unequal := []string{shareID(0, 0), shareID(1, 1)}
	for name, tc := range map[string]struct {
		injection string
		host      inventory.Host
		ids       []string
		cdi, err  string
	}{
		"variables":           {"variables", host, []string{shareID(0, 0)}, "", ""},
		"variables, two GPUs": {"variables", host, unequal, "", ""},
		"cdi":                 {"cdi", host, []string{shareID(0, 0)}, `["K/gpu=` + gpuID(0) + `","K/memory-limit=20480"]`, ""},
		"cdi, two shares":     {"cdi", host, []string{shareID(0, 2), shareID(0, 0)}, `["K/gpu=` + gpuID(0) + `","K/memory-limit=40960"]`, ""},
		"cdi, two GPUs": {"cdi", host, unequal, "", "shares of gpu.shared with different limits: 20480 MiB of " + gpuID(0) + ", 26845 MiB of " + gpuID(1) +
			": a container has one limit for all of its GPUs: request one share, or GPUs with equal shares"},
		"no limits": {"variables", withheld, []string{shareID(0, 0)}, "", "driver 580.95.05: want 615 or newer"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, nil)
			s.mustConfigure(t, map[string]any{"injection": []string{tc.injection}})
			s.currentRun()
			cfg := s.Started()[0].Core
			cfg.Policy = limited("")
			host := tc.host
			of := *host.CDI
			of.Limits = core.Build(machine, health.Ledger{}, cfg).WithHost(host, cfg.Overlap).HookLimits()
			host.CDI = &of
			s.Source.Set(core.Build(machine, health.Ledger{}, cfg).WithHost(host, cfg.Overlap))
			got, err := nomadtest.Serve(t, s.Plugin).Reserve(tc.ids)
			if tc.err != "" {
				if !errorContains(err, tc.err) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			check.NoError(t, err)
			for variable := range got.Envs {
				if strings.HasPrefix(variable, "NVIDIA_GPU_MEMORY") {
					t.Errorf("variables %v", got.Envs)
				}
			}
			if want := strings.ReplaceAll(tc.cdi, "K/", kind); got.Envs["CDI_DEVICES"] != want {
				t.Errorf("CDI devices %s, want %s", got.Envs["CDI_DEVICES"], want)
			}
		})
	}
}

// What a task gets by each injection, of a GPU, a MIG instance, a share and an MPS share.
func TestReserveByInjection(t *testing.T) {
	const (
		kind    = "nomad.device-plugin.nvidia.com/gpu"
		control = "/dev/nvidia-uvm /dev/nvidia-uvm-tools /dev/nvidiactl "
		pipe    = "/srv/mps/nvidia.com/gpu.mps/pipe"
	)
	machine := withDetails(coretest.WithMIG(coretest.GPUs(4), 3, "1g.10gb"))
	instance := string(coretest.Instance(3, 0))
	sharing := rules(
		inventory.Rule{Select: selectGPUs(1), Sharing: timeSlicing(2)},
		inventory.Rule{Select: selectGPUs(2), Sharing: &inventory.Sharing{Mode: inventory.MPS, Replicas: 2, OnePerRequest: true, Memory: 4 << 30, Threads: 25}},
	)
	units := map[string]string{"GPU": gpuID(0), "instance": instance, "share": shareID(1, 1), "MPS": shareID(2, 0)}
	devices := map[string]string{"GPU": gpuID(0), "instance": instance, "share": gpuID(1), "MPS": gpuID(2)}
	nodes := map[string]string{"GPU": "/dev/nvidia0", "instance": "/dev/nvidia-caps/nvidia-cap400 /dev/nvidia-caps/nvidia-cap401 /dev/nvidia3", "share": "/dev/nvidia1", "MPS": "/dev/nvidia2"}
	libraries := []inventory.Mount{
		{HostPath: "/usr/lib/libcuda.so.580.95.05", ContainerPath: "/usr/lib/libcuda.so.1", ReadOnly: true},
		{HostPath: "/run/nvidia-persistenced/socket", ContainerPath: "/run/nvidia-persistenced/socket"},
	}
	cdi := &inventory.CDI{Kind: kind, Others: []string{kind[:len(kind)-3] + "gds=all"}, Libraries: libraries}
	for _, d := range machine.Devices {
		cdi.Defined = append(cdi.Defined, d.ID)
	}
	slices.Sort(cdi.Defined)
	for name, tc := range map[string]struct {
		injection              []string
		variable               string // with the UUID
		nodes, cdi, withMounts bool
	}{
		"default":            {nil, "NVIDIA_VISIBLE_DEVICES", true, false, false},
		"variables":          {[]string{"variables"}, "NVIDIA_VISIBLE_DEVICES", true, false, false},
		"devices":            {[]string{"devices"}, "CUDA_VISIBLE_DEVICES", true, false, false},
		"cdi":                {[]string{"cdi"}, "CUDA_VISIBLE_DEVICES", false, true, false},
		"variables, cdi":     {[]string{"cdi", "variables"}, "NVIDIA_VISIBLE_DEVICES", true, true, false},
		"devices, libraries": {[]string{"devices", "libraries"}, "CUDA_VISIBLE_DEVICES", true, false, true},
	} {
		s := newFixture(t, nil)
		s.mustConfigure(t, map[string]any{"injection": tc.injection, "mps_root": "/srv/mps"})
		s.currentRun()
		cfg := s.Started()[0].Core
		cfg.Policy = sharing
		s.Source.Set(core.Build(machine, health.Ledger{}, cfg).WithHost(inventory.Host{MPS: []string{"gpu.mps"}, CDI: cdi}, cfg.Overlap))
		for unit, id := range units {
			want := &device.ContainerReservation{Envs: map[string]string{tc.variable: devices[unit]}}
			if tc.nodes {
				paths := strings.Fields(control + nodes[unit])
				slices.Sort(paths)
				for _, path := range paths {
					want.Devices = append(want.Devices, deviceNode(path, ""))
				}
				want.Envs["TANDEM_GPU_NODES"] = strings.Join(slices.DeleteFunc(paths, func(p string) bool { return p == "/dev/nvidia-uvm-tools" }), ":")
			}
			if tc.cdi {
				want.Envs["CDI_DEVICES"] = `["` + kind + `=` + devices[unit] + `","nomad.device-plugin.nvidia.com/gds=all"]`
			}
			if unit == "MPS" {
				want.Envs["CUDA_MPS_PIPE_DIRECTORY"] = pipe
				want.Envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], want.Envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = "25", "0=4096M"
			}
			if tc.withMounts {
				for _, m := range libraries {
					want.Mounts = append(want.Mounts, &device.Mount{TaskPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: m.ReadOnly})
				}
				if unit == "MPS" {
					want.Mounts = append(want.Mounts, &device.Mount{TaskPath: pipe, HostPath: pipe}, &device.Mount{TaskPath: "/dev/shm", HostPath: "/dev/shm"})
				}
			}
			got, err := s.Reserve([]string{id})
			if err != nil {
				t.Errorf("%s, %s: %v", name, unit, err)
			}
			checkEqual(t, name+", "+unit, want, got)
		}
	}
}

// With health_mode "observe" an unhealthy device is reserved.
func TestReserveWithoutEnforcedHealth(t *testing.T) {
	s := newFixture(t, nil)
	s.mustConfigure(t, map[string]any{"health_mode": "observe"})
	s.currentRun()
	s.Source.Set(inventoryWith(s.Started()[0].Core, coretest.GPUs(2), lost(1)))
	if r, err := s.Reserve([]string{gpuID(1)}); err != nil || r.Envs[inventory.VisibleDevices] != gpuID(1) {
		t.Errorf("%+v, %v", r, err)
	}
}

// An error names what is wrong with each device; the source gets nothing.
func TestReserveRefuses(t *testing.T) {
	ready := nodeInventory(coretest.GPUs(4), lost(1), lost(2))
	gone, obs := core.Reconcile(coretest.GPUs(1), gpu.NoDriver(gpu.DriverFailed, "no answer"))
	for name, tc := range map[string]struct {
		inv  *inventory.Allocatable
		ids  []string
		want string
	}{
		"unknown":     {ready, []string{"GPU-b", gpuID(0), "GPU-a"}, "unknown device IDs: GPU-a,GPU-b"},
		"unhealthy":   {ready, []string{gpuID(0), gpuID(2), gpuID(1)}, "unhealthy devices: " + gpuID(1) + " is " + lostText + "; " + gpuID(2) + " is lost"},
		"both":        {ready, []string{gpuID(1), "GPU-a"}, "unknown device IDs: GPU-a; unhealthy devices: " + gpuID(1)},
		"no driver":   {nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "no library")), []string{gpuID(0)}, "unknown device IDs: " + gpuID(0) + " (driver absent: no library)"},
		"lost driver": {nodeInventory(gone, obs...), []string{gpuID(0)}, "is unknown: driver is not usable (no answer)"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t, tc.inv)
			got, err := s.Reserve(tc.ids)
			if !errorContains(err, tc.want) || len(s.Source.reserved) > 0 {
				t.Errorf("got %+v, %v; want %q", got, err, tc.want)
			}
			if !strings.Contains(s.Log.String(), "reservation refused") {
				t.Errorf("logged:\n%s", s.Log)
			}
		})
	}
}

// After a crash Nomad reserves devices that the previous process announced: a reservation waits for the first snapshot, for
// at most reserveWait. Nomad waits for 10 s.
func TestReserveWaitsForTheFirstSnapshot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nil)
		begin := time.Now()
		_, err := s.Reserve([]string{gpuID(0)})
		if !errorContains(err, "unknown device IDs: "+gpuID(0)+" (driver pending: not asked yet)") || time.Since(begin) >= 10*time.Second {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
		time.AfterFunc(3*time.Second, func() { s.Source.Set(nodeInventory(coretest.GPUs(1))) })
		if _, err := s.Reserve([]string{gpuID(0)}); err != nil {
			t.Error(err)
		}
		if r, err := s.Reserve(nil); r == nil || err != nil {
			t.Errorf("nothing: %v, %v", r, err)
		}
	})
}

// While the specification that one pool needs is being written, other pools do not wait for it.
func TestReserveDoesNotWaitForCDIOfOtherPools(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := core.DefaultConfig()
		cfg.Policy.Rules = []inventory.Rule{{
			Select: inventory.Selector{IDs: []gpu.DeviceID{coretest.GPU(0)}}, Pool: "names", Injection: &inventory.Injection{CDI: inventory.CDIRequired},
		}}
		inv := core.Build(coretest.GPUs(2), health.Ledger{}, cfg).WithHost(inventory.Host{}, inventory.OverlapWarn)
		s := newFixture(t, inv)
		begin := time.Now()
		if _, err := s.Reserve([]string{gpuID(1)}); err != nil || time.Since(begin) > 0 || !inv.Provisional() {
			t.Errorf("after %s: %v; provisional %t", time.Since(begin), err, inv.Provisional())
		}
		if _, err := s.Reserve([]string{gpuID(0)}); !errorContains(err, "no CDI definition") || time.Since(begin) != reserveWait {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}
	})
}

// What the check of a reservation finds is logged; its error fails the reservation, which the source does not get.
func TestReserveChecks(t *testing.T) {
	s := newFixture(t, nodeInventory(coretest.GPUs(2)))
	finding := inventory.Finding{Device: coretest.GPUs(2).Devices[1], Processes: []gpu.Process{{PID: 31, Memory: gpu.OptionalUint64Of(2 << 20)}}}
	var fail error
	s.Source.check = func(units []inventory.Unit) ([]inventory.Finding, error) {
		if len(units) != 1 || units[0].Device.ID != finding.Device.ID {
			t.Errorf("checked %v", units)
		}
		if fail != nil {
			return nil, fail
		}
		return []inventory.Finding{finding}, nil
	}
	p := nomadtest.Serve(t, s.Plugin)
	if _, err := p.Reserve([]string{gpuID(1)}); err != nil || len(s.Source.reserved) != 1 {
		t.Errorf("%v, reserved %v", err, s.Source.reserved)
	}
	checkContains(t, s.Log.String(), "device reserved despite the reservation check", gpuID(1), "0000:11:00.0", "pid 31 (2 MiB)")
	fail = &inventory.CheckError{Findings: []inventory.Finding{finding}}
	if _, err := p.Reserve([]string{gpuID(1)}); !errorContains(err, fail.Error()) || len(s.Source.reserved) != 1 {
		t.Errorf("%v, reserved %v", err, s.Source.reserved)
	}
	checkContains(t, s.Log.String(), "reservation refused", fail.Error())
}
