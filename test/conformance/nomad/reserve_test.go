package nomad

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/nomad/structs"
	"github.com/hashicorp/nomad/plugins/device"
)

func Test14Reserve(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	g := a.devices(t, 8, 8)[0]
	all := ids([]*structs.NodeDeviceResource{g})
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

// Nomad knows the ID from the former list, the plugin not any more: the last one to check is the plugin.
func Test14ReserveUnknown(t *testing.T) {
	m := install(t, "h100x8")
	a := startAgent(t, m, nil)
	g := a.devices(t, 8, 8)[0]
	i, err := a.cat.Dispense("nvidia-gpu", "device", nil, hclog.NewNullLogger())
	if err != nil {
		t.Fatal(err)
	}
	defer i.Kill()
	p := i.Plugin().(device.DevicePlugin)
	_, err = p.Reserve([]string{"GPU-y", g.Instances[0].ID, "GPU-x"})
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
		if err != nil {
			t.Fatal(err)
		}
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
