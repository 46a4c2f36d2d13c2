package nomad

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/device"
)

func Test14Reserve(t *testing.T) {
	m, a, groups := onMachine(t, "h100x8", nil, 8)
	g, all := groups[0], ids(groups)
	visible := func(r *device.ContainerReservation) string { return r.Envs["NVIDIA_VISIBLE_DEVICES"] }
	for name, tc := range map[string]struct {
		ids  []string
		want string // of the environment
	}{
		"one":      {all[:1], all[0]},
		"some":     {[]string{all[5], all[1]}, all[1] + "," + all[5]},
		"all":      {all, strings.Join(all, ",")},
		"repeated": {[]string{all[2], all[2]}, all[2]},
		"none":     {nil, ""},
	} {
		r, err := a.reserve(g, tc.ids...)
		if err != nil || r == nil {
			t.Errorf("%s: %v, %v", name, r, err)
			continue
		}
		if got := visible(r); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		backwards := slices.Clone(tc.ids)
		slices.Reverse(backwards)
		if s, err := a.reserve(g, backwards...); err != nil || !reflect.DeepEqual(r, s) {
			t.Errorf("%s: the order of the IDs matters: %v, %v", name, s, err)
		}
	}

	var wg sync.WaitGroup
	for i := range 64 {
		wg.Go(func() {
			if r, err := a.reserve(g, all[i%8], all[(i+1)%8]); err != nil || strings.Count(visible(r), "GPU-") != 2 {
				t.Errorf("%d: %v, %v", i, r, err)
			}
		})
	}
	wg.Wait()

	m.ctl(t, "lose", "4")
	a.devices(t, 8, 7)
	if _, err := a.reserve(g, all[3], all[4]); err == nil || !strings.Contains(err.Error(), "unhealthy devices: "+all[4]) {
		t.Errorf("unhealthy: %v", err)
	}
	m.ctl(t, "hang", "all", "nvmlDeviceGetUUID")
	begin := time.Now()
	if _, err := a.reserve(g, all[0]); err != nil {
		t.Errorf("while the driver hangs: %v", err)
	}
	if d := time.Since(begin); d > time.Second {
		t.Errorf("while the driver hangs: after %s", d)
	}
}

// Nomad checks IDs by the last fingerprint, which may be older than what the plugin knows: the plugin checks them, too.
func Test14ReserveUnknown(t *testing.T) {
	_, a, groups := onMachine(t, "h100x8", nil, 8)
	i, err := a.catalog.Dispense("nvidia-gpu", "device", nil, hclog.NewNullLogger())
	must(t, err)
	defer i.Kill()
	p := i.Plugin().(device.DevicePlugin)
	_, err = p.Reserve([]string{"GPU-y", ids(groups)[0], "GPU-x"})
	if err == nil || !strings.Contains(err.Error(), "unknown device IDs: GPU-x,GPU-y") {
		t.Errorf("got %v", err)
	}
}

func Test15ReservedPaths(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: without root the simulated machine has no device nodes")
	}
	m := install(t, "a100-mig")
	a := startAgent(t, m, nil)
	for _, g := range a.first(t, m) {
		r, err := a.reserve(g, g.Instances[0].ID)
		must(t, err)
		if len(r.Mounts) != 0 {
			t.Errorf("%s: mounts: %v", g.Name, r.Mounts)
		}
		var paths []string
		for _, d := range r.Devices {
			paths = append(paths, d.TaskPath)
			info, err := os.Lstat(d.HostPath)
			if err != nil || info.Mode()&os.ModeCharDevice == 0 {
				t.Errorf("%s: %s is no device node: %v", g.Name, d.HostPath, err)
			}
			if d.HostPath != filepath.Join(string(m), d.TaskPath) || !regexp.MustCompile(`^[rwm]+$`).MatchString(d.CgroupPerms) {
				t.Errorf("%s: %+v", g.Name, d)
			}
		}
		caps := len(slices.DeleteFunc(slices.Clone(paths), func(p string) bool { return !strings.HasPrefix(p, "/dev/nvidia-caps/") }))
		if mig := strings.HasPrefix(g.Instances[0].ID, "MIG-"); mig && caps != 2 || !mig && caps != 0 {
			t.Errorf("%s: paths: %v", g.Name, paths)
		}
		if !slices.Contains(paths, "/dev/nvidiactl") || !slices.Contains(paths, "/dev/nvidia-uvm") {
			t.Errorf("%s: paths: %v", g.Name, paths)
		}
		for k, v := range r.Envs {
			if strings.Contains(v, "${") {
				t.Errorf("%s=%s would be interpolated", k, v)
			}
		}
	}
}

// A changed policy applies after SIGHUP, in the same process; an invalid one changes nothing.
func Test07PolicyByHangup(t *testing.T) {
	m, a, whole := underPolicy(t, "h100x8", "", 8)
	hup := func(text string) {
		t.Helper()
		m.policy(t, text)
		a.signal(t, syscall.SIGHUP)
	}
	pid, updates := a.pid(), len(a.Updates())
	hup("policy: {rules: [{select: {index: nine}, use: time-slicing, replicas: 4}, {select: {index: 1}, use: halved}]}\n")
	await(t, "both problems in the log", func() bool {
		logs := a.logs.String()
		return strings.Contains(logs, "nine") && strings.Contains(logs, "halved") && strings.Contains(logs, "previous policy remains in effect")
	})
	if !reflect.DeepEqual(a.devices(t, 8, 8), whole) || len(a.Updates()) != updates {
		t.Error("an invalid policy changed something")
	}
	hup(divided)
	groups := a.until(t, "shares", func(g []*structs.NodeDeviceResource) bool { return len(instances(g)) == 18 })
	if got := newCluster(t, node(groups)).place(t, ask("nvidia/gpu-shared", 12)); got == nil {
		t.Error("twelve shares are not placed")
	}
	hup("")
	if back := a.until(t, "whole GPUs", func(g []*structs.NodeDeviceResource) bool { return len(instances(g)) == 8 }); !reflect.DeepEqual(back, whole) {
		t.Error("not as before")
	}
	if a.pid() != pid || len(a.launches(t)) != 3 {
		t.Error("another process was started")
	}
}

// A plugin that is killed while the policy file is invalid is started with the previous policy. If it refused its
// configuration, Nomad would start no other one, and allocate GPUs that can't be reserved.
func Test12KilledUnderAnInvalidPolicy(t *testing.T) {
	m, a, was := underPolicy(t, "h100x8", "policy: {rules: [{select: {index: [0, 1]}, use: time-slicing, replicas: 4}]}\n", 14)
	await(t, "the saved policy", func() bool {
		_, err := os.Stat(filepath.Join(string(m), "state", "nomad-gpu.policy.yaml"))
		return err == nil
	})
	m.policy(t, "policy: {rules: [{select: {index: 1}, use: halved}]}\n")
	for range 3 {
		pid, updates := a.pid(), len(a.Updates())
		a.signal(t, syscall.SIGKILL)
		await(t, "another process and its fingerprint", func() bool { return a.pid() != pid && len(a.Updates()) > updates })
		if !reflect.DeepEqual(a.devices(t, 14, 14), was) {
			t.Error("not as before")
		}
		if _, err := a.reserve(group(t, was, "gpu-shared", "H100"), m.uuid(t, 1)+"::3"); err != nil {
			t.Error(err)
		}
	}
	if !strings.Contains(a.logs.String(), "halved") {
		t.Error("the problem is not in the log")
	}
}
