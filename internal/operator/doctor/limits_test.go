package doctor_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/limitserver"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// limits sets a policy with limits of memory, on a node that has what they need.
func (s *situation) limits(t *testing.T, mode inventory.LimitMode) {
	s.options.Limits, s.options.Roots.Cgroup = mode, s.root+"/cgroup"
	s.driver.Driver.Version = "620.10.01"
	for i := range s.driver.Devices {
		s.driver.Devices[i].MemoryLimit = mode.String()
	}
	s.write(t, "cgroup/cgroup.controllers", "cpuset cpu io memory pids misc\n")
	s.write(t, "proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
}

func (s *situation) write(t *testing.T, path, text string) {
	path = filepath.Join(s.root, path)
	check.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.RemoveAll(path)))
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

// tasks has the groups of Nomad's tasks, of which some enable a controller.
func (s *situation) tasks(t *testing.T, controllers ...string) {
	s.options.Program = nomad
	for i, group := range []string{"", "/nomad.slice", "/nomad.slice/share.slice", "/nomad.slice/reserve.slice"} {
		s.write(t, "cgroup"+group+"/cgroup.subtree_control", "cpu "+controllers[i]+"\n")
	}
}

// limited has the running agent report shares in some states.
func (s *situation) limited(shares ...report.MemoryLimit) {
	r := s.running()
	for i := range shares {
		shares[i].GPU, shares[i].Work.Orchestrator, shares[i].Work.Namespace = r.Devices[0].GPU, "nomad", "default"
	}
	r.MemoryLimits = &report.MemoryLimits{Shares: shares}
}

// withoutSetter has shares with a limit offered through an API, and nothing that sets limits.
func (s *situation) withoutSetter(through inventory.API) {
	for i := range s.driver.Devices {
		s.driver.Devices[i].API = string(through)
	}
	s.options.LimitSetter = func(context.Context) error {
		return &limitserver.UnavailableError{Remedy: "run the component on this node", Err: errors.New("dial unix /var/lib/tandem/limits.sock: no such file")}
	}
}

// Each thing without which no limit holds is named with its remedy, also without an agent; what the agent reports is not repeated. Without limits in the policy, and
// without any of other programs, there is nothing.
func TestLimits(t *testing.T) {
	const required, bestEffort = inventory.LimitRequired, inventory.LimitBestEffort
	var golden strings.Builder
	for _, c := range []struct {
		name string
		set  func(*situation)
	}{
		{"no limits in the policy", func(s *situation) {
			s.limits(t, inventory.LimitNone)
			s.driver.Driver.Version, s.system.NotUnified = "580.159.04", errors.New("no control groups of version 2")
		}},
		{"misc", func(s *situation) { s.limits(t, required) }},
		{"dmem", func(s *situation) {
			s.limits(t, required)
			s.write(t, "cgroup/cgroup.controllers", "cpu dmem\n")
			s.write(t, "cgroup/dmem.capacity", "drm/0000:00:02.0/stolen 67108864\nnvidia/00000000:19:00.0/vidmem 85899345920\n")
		}},
		{"an older driver", func(s *situation) { s.limits(t, required); s.driver.Driver.Version = "580.159.04" }},
		{"an older driver, best effort", func(s *situation) {
			s.limits(t, bestEffort)
			s.driver.Driver.Version = "580.159.04"
			s.running().Problems = problem.Each(problem.LimitUnsupported, "driver 580.159.04: want 615 or newer")
		}},
		{"the first branch", func(s *situation) { s.limits(t, required); s.driver.Driver.Version = "615.71.09" }},
		{"hybrid control groups (fence 20)", func(s *situation) {
			s.limits(t, required)
			s.system.NotUnified = errors.New("no control groups of version 2 at /sys/fs/cgroup")
		}},
		{"control groups of the container (fence T11)", func(s *situation) {
			s.limits(t, required)
			s.write(t, "cgroup/cgroup.events", "populated 1\n")
		}},
		{"a kernel without controllers", func(s *situation) {
			s.limits(t, required)
			s.write(t, "cgroup/cgroup.controllers", "cpu memory dmem\n")
			s.write(t, "cgroup/dmem.capacity", "drm/0000:00:02.0/stolen 67108864\n")
			s.write(t, "boot/config-6.8.0-45-generic", "CONFIG_CGROUP_DMEM=y\n# CONFIG_CGROUP_MISC is not set\n")
		}},
		{"switched off in the module", func(s *situation) {
			s.limits(t, required)
			s.write(t, "proc/driver/nvidia/params", "ModifyDeviceFiles: 1\nRegistryDwords: \"RMPowerFeature=0x55;RmMemacctMode=0\"\n")
		}},
		{"controllers off in Nomad's groups, no agent (fence 26)", func(s *situation) { s.limits(t, required); s.tasks(t, "", "", "", "") }},
		{"controllers off in Nomad's groups (fence 26)", func(s *situation) {
			s.limits(t, required)
			s.tasks(t, "misc", "misc", "", "misc")
			s.running().Problems = problem.Each(problem.LimitController, "the controller misc is off in nomad.slice/share.slice")
		}},
		{"controllers on in Nomad's groups", func(s *situation) { s.limits(t, required); s.tasks(t, "misc", "misc", "misc", "misc"); s.running() }},
		{"NVIDIA's runtime in mode legacy", func(s *situation) {
			s.limits(t, required)
			s.write(t, "usr/bin/nvidia-container-runtime", "")
			s.write(t, "etc/nvidia-container-runtime/config.toml", "[nvidia-container-runtime]\nmode = \"legacy\"\n")
		}},
		{"nothing sets limits of claims", func(s *situation) { s.limits(t, required); s.withoutSetter(inventory.DRA) }},
		{"nothing corrects limits of the device plugin", func(s *situation) { s.limits(t, required); s.withoutSetter(inventory.DevicePlugin) }},
		{"allocations are not read, by the settings", func(s *situation) {
			s.limits(t, required)
			s.tasks(t, "misc", "misc", "misc", "misc")
			s.options.LimitSettings = []problem.Problem{{Text: "it is not known which work has a GPU: nomad_address is off", Remedy: "set nomad_address"}}
		}},
		{"allocations are not read, no token", func(s *situation) {
			s.limits(t, bestEffort)
			s.running().OwnersUnknown = &report.Unknown{Reason: "the Nomad agent refuses the token", Remedy: "set nomad_token_file"}
		}},
		{"work of a policy with more shares", func(s *situation) {
			s.limits(t, required)
			hard := uint64(20 << 30)
			share := func(name, group string) report.MemoryLimit {
				return report.MemoryLimit{Begun: true, Work: report.Owner{Name: name, ID: name}, State: "limited", WantBytes: hard, HardBytes: &hard, ControlGroup: group}
			}
			s.limited(share("a", "/a"), share("b", "/b"), share("c", "/c"), share("d", "/d"), share("of-the-pod-of-d", "/d"), share("e", "/e"))
			d := &s.agent.Devices[0]
			d.MemoryLimit, d.MemoryBytes, d.MemoryLimitBytes, d.Replicas = "required", 80<<30, 39<<30, 2
		}},
		{"variables that nothing reads (fence 6)", func(s *situation) {
			s.limits(t, bestEffort)
			s.opens(t, 4001, "python3", 0, 1)
			s.write(t, "proc/4001/environ", "PATH=/bin\x00NVIDIA_GPU_MEMORY_LIMITS=20480\x00NVIDIA_GPU_MEM_LIMIT=1\x00NVIDIA_GPU_MEMORY_LIMIT=1\x00CUDA_MEM_LIMIT=1\x00")
			s.opens(t, 4002, "python3", 0)
			s.write(t, "proc/4002/environ", "NVIDIA_GPU_MEMORY_REQUEST=0\x00")
		}},
		{"shares of a running agent (fence T5)", func(s *situation) {
			s.limits(t, required)
			share := func(name, state, reason string, used uint64) report.MemoryLimit {
				return report.MemoryLimit{Begun: true, Work: report.Owner{Name: name, Container: "t", ID: name}, State: state, Reason: reason, WantBytes: 20 << 30, UsedBytes: &used, ControlGroup: "/nomad.slice/share.slice/" + name + ".t.scope"}
			}
			other := share("other", "foreign", "another program has set it", 1)
			other.WantBytes = 0
			idle := share("image-is-pulled", "unknown", "its control group is not known before a process of it uses the GPU", 0)
			idle.Begun, idle.Required = false, true
			s.limited(idle, share("fine", "limited", "", 1), share("idle", "limited", "", 0), share("name-only", "limited", "", 0), share("slow", "late", "the task used the GPU before", 1),
				share("off", "not limited", "the controller misc is off", 0), share("new", "unknown", "", 0), other)
			for _, name := range []string{"fine", "name-only", "idle"} {
				memory := uint64(5 << 30)
				if name == "idle" {
					memory = 300 << 20
				}
				s.agent.Devices[0].Processes = append(s.agent.Devices[0].Processes, report.Process{MemoryBytes: &memory, Owner: &report.Owner{ID: name, Container: "t"}})
			}
		}},
		{"limits of other programs only", func(s *situation) {
			s.limited(report.MemoryLimit{Work: report.Owner{Name: "other", ID: "5b1f3c58"}, State: "foreign"})
		}},
	} {
		s := newSituation(t)
		c.set(s)
		fmt.Fprintln(&golden, c.name)
		for _, f := range s.run(t) {
			if f.Check == "agent" && strings.Contains(f.Place, "warnings") {
				t.Errorf("%s: twice: %s", c.name, f.Found)
			}
			if f.Check == "limits" {
				golden.WriteString(strings.ReplaceAll(fmt.Sprintf("  %s: %s\n    at: %s\n    do: %s\n", f.Severity, f.Found, f.Place, f.Remedy), s.root, "$ROOT"))
			}
		}
	}
	goldenfile.Compare(t, "testdata/limits.txt", golden.String())
}

// Fence 32: what a hook program of each version does with limits.
func TestLimitsOfHookPrograms(t *testing.T) {
	for version, want := range map[string]string{
		"1.17.8": "containers with a limit do not start", "1.18.2": "containers start without a limit", "1.19.1": "containers start without a limit",
		"1.20.0": "containers start without a limit", "1.20.0-rc.2": "containers start without a limit", "1.20.1": "", "1.20.1-rc.1": "", "1.21.0": "", "2.0": "", "": "",
	} {
		for mode, severity := range map[inventory.LimitMode]doctor.Severity{inventory.LimitRequired: doctor.Problem, inventory.LimitBestEffort: doctor.Warning} {
			found := doctor.HookFindings(version, mode)
			if len(found) > 1 || (len(found) == 1) != (want != "") || want != "" && (!strings.Contains(found[0].Found, want) || found[0].Severity != severity) {
				t.Errorf("%s %s: %+v, want %q", version, mode, found, want)
			}
		}
	}
}
