package agents

import (
	"encoding/json"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// explained is what explain prints; its exit code shows whether a request would be refused.
func (a *agent) explained(args ...string) (e explain.Explanation) {
	a.Helper()
	cmd := exec.CommandContext(a.Context(), filepath.Join(bin, a.program), slices.Concat([]string{"explain", "--json", "--state-dir=" + a.state}, args)...)
	out, err := cmd.Output()
	if json.Unmarshal(out, &e) != nil || (err != nil) != (e.Refused() != nil) {
		a.Fatalf("explain %v: %v\n%s", args, err, out)
	}
	return e
}

// response is what the orchestrator gets for devices of a resource, in the form of an explanation.
func (a *agent) response(resource string, ids []string) (r explain.Response) {
	a.Helper()
	if a.program == nomadGPU {
		made, err := a.Reserve(ids)
		a.must(err)
		r.Env = made.Envs
		for _, d := range made.Devices {
			r.DeviceNodes = append(r.DeviceNodes, explain.Node{HostPath: d.HostPath, ContainerPath: d.TaskPath, Permissions: d.CgroupPerms})
		}
		for _, m := range made.Mounts {
			r.Mounts = append(r.Mounts, explain.Mount{HostPath: m.HostPath, ContainerPath: m.TaskPath, ReadOnly: m.ReadOnly})
		}
		return r
	}
	made, err := a.kubelet.Allocate(a.Context(), resource, ids...)
	a.must(err)
	r.Env, r.Annotations = made.GetEnvs(), made.GetAnnotations()
	for _, d := range made.GetDevices() {
		r.DeviceNodes = append(r.DeviceNodes, explain.Node{HostPath: d.GetHostPath(), ContainerPath: d.GetContainerPath(), Permissions: d.GetPermissions()})
	}
	for _, m := range made.GetMounts() {
		r.Mounts = append(r.Mounts, explain.Mount{HostPath: m.GetHostPath(), ContainerPath: m.GetContainerPath(), ReadOnly: m.GetReadOnly()})
	}
	for _, d := range made.GetCdiDevices() {
		r.CDIDevices = append(r.CDIDevices, d.GetName())
	}
	return r
}

func sameResponse(a, b explain.Response) bool {
	return maps.Equal(a.Env, b.Env) && maps.Equal(a.Annotations, b.Annotations) && slices.Equal(a.DeviceNodes, b.DeviceNodes) &&
		slices.Equal(a.Mounts, b.Mounts) && slices.Equal(a.CDIDevices, b.CDIDevices)
}

// The response in an explanation is what the orchestrator gets for the same devices, and the choice for a number of devices is what the
// kubelet is answered. Configuration and state are those of the running agent, also after a reload.
func TestExplainIsTrue(t *testing.T) {
	const policy = header + `policy:
  rules:
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 4}
    - {select: {index: 7}, use: reserved}
`
	for name, settings := range map[string]map[string]map[string]any{
		"default": {},
		"CDI":     {k8sGPU: {"device_list_strategy": "cdi-annotations,cdi-cri", "pass_device_specs": "true"}, nomadGPU: {"injection": []any{"cdi", "devices"}}},
		"mounts":  {k8sGPU: {"device_list_strategy": "volume-mounts", "device_id_strategy": "index", "pass_device_specs": "true"}, nomadGPU: {"injection": []any{"devices", "libraries"}}},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				maps.Copy(a.settings, settings[a.program])
				a.settings["cdi_dir"] = a.dir + "/cdi"
				a.useFile(policy)
				a.start()
				a.healthy(13, 13)
				for _, args := range [][]string{{"3"}, {"GPU-" + a.driver.UUID(2)[4:9], a.driver.UUID(4)}, {a.driver.UUID(1) + "::2"}, {"--count=3"}, {"--count=2", "--pool=nvidia.com/gpu.shared"}, {"--count=2", "5"}} {
					e := a.explained(args...)
					if e.Source != report.FromAgent || len(e.Requests) != 1 || e.Requests[0].Response == nil {
						t.Fatalf("explain %v: %+v", args, e)
					}
					r, ids := e.Requests[0], []string(nil)
					for _, id := range e.Requests[0].Units {
						ids = append(ids, string(id))
					}
					if real := a.response("nvidia.com/"+r.Pool, ids); !sameResponse(real, *r.Response) {
						t.Errorf("explain %v: %+v, but the response is %+v", args, *r.Response, real)
					}
					if r.Count > 0 && a.program == k8sGPU && len(args) < 3 && args[0] != "--count=2" {
						preferred, err := a.kubelet.Prefer(a.Context(), "nvidia.com/"+r.Pool, a.unitsOf(r.Pool), nil, r.Count)
						if slices.Sort(preferred); err != nil || !slices.Equal(preferred, ids) {
							t.Errorf("explain %v: %v, but the kubelet is answered %v, %v", args, ids, preferred, err)
						}
					}
				}
				a.xid(3, 95)
				a.healthy(13, 12)
				if e := a.explained("3"); !strings.Contains(e.Requests[0].Refused, "XID 95") || e.Requests[0].Response != nil || e.Devices[0].Schedulable {
					t.Errorf("of an unhealthy GPU: %+v", e)
				}
				if e := a.explained("--count=5"); !strings.HasPrefix(e.Requests[0].Refused, "4 of 5 devices") || !strings.Contains(e.Requests[0].NotChosen[0].Why, "XID 95") {
					t.Errorf("of too many: %+v", e.Requests[0])
				}
				if e := a.explained(); len(e.Devices) != 8 || e.Devices[7].By != "rule config.yaml:5: policy.rules[1].select" || e.Devices[0].SharingBy != "rule config.yaml:4: policy.rules[0].select" {
					t.Errorf("%+v", e.Devices)
				}
				a.useFile(strings.Replace(policy, "index: 7", "index: 6", 1))
				a.signal(syscall.SIGHUP)
				a.await("the new policy", func() bool { return a.explained("6").Devices[0].Reason == "reserved by config.yaml:5" })
				for _, wrong := range []struct{ arg, want string }{
					{"99", `device = "99": no such device: explain without arguments lists them`}, {"nvidia.com/gpu", "want --pool=nvidia.com/gpu --count=N"}, {"--pool=gpu.shard", `pool = "gpu.shard": no such pool: did you mean gpu.shared? (gpu, gpu.shared)`},
					{"x", "want a UUID"}, {"--count=0", "--count = 0: want a positive number"},
				} {
					if out, err := a.command("explain", wrong.arg); err == nil || !strings.HasPrefix(out, a.program+": ") || !strings.Contains(out, wrong.want) {
						t.Errorf("explain %s: %v, %s", wrong.arg, err, out)
					}
				}
			})
		})
	}
}

// unitsOf are the healthy units of a pool that the kubelet has.
func (a *agent) unitsOf(pool string) (ids []string) {
	list, _ := a.kubelet.Devices("nvidia.com/" + pool)
	for _, d := range list {
		ids = append(ids, d.GetID())
	}
	return ids
}
