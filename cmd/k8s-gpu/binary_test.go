package main

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func TestEightGPUs(t *testing.T) {
	t.Parallel()
	m, k := simdriver.StartParallel(t, "h100x8"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--health-period=200ms", "--recovery-dwell=200ms")...)
	a.awaitHealthy(k, 8)
	a.awaitReady("offered to the kubelet: nvidia.com/gpu")

	want := m.UUID(2) + "," + m.UUID(5)
	if r, err := k.Allocate(a.ctx, gpuResource, m.UUID(5), m.UUID(2)); err != nil || r.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] != want {
		t.Errorf("Allocate: %v, %v; want %s", r, err, want)
	}
	if err := m.Lose(5); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	if r, err := k.Allocate(a.ctx, gpuResource, m.UUID(5)); err == nil {
		t.Errorf("Allocate of a lost GPU: %v", r)
	}
	_, metrics := a.get("/metrics")
	for _, line := range []string{
		`tandem_devices{health="healthy",resource="nvidia.com/gpu"} 7`,
		`tandem_devices{health="lost",resource="nvidia.com/gpu"} 1`,
		`tandem_devices{health="degraded",resource="nvidia.com/gpu"} 0`,
		`tandem_device_health{device="` + m.UUID(5) + `",model="NVIDIA H100 80GB HBM3",state="lost"} 1`,
		`tandem_device_condition{cause="LOST",ci="",gi="",gpu="` + m.UUID(5) + `",simulated="false",state="lost"} 1`,
		`tandem_registrations_total{resource="nvidia.com/gpu"} 1`,
		`tandem_allocations_total{resource="nvidia.com/gpu"} 1`,
		`tandem_allocation_errors_total{resource="nvidia.com/gpu"} 1`,
		`tandem_build_info{agent="k8s-gpu"`,
	} {
		if !strings.Contains(metrics, line) {
			t.Errorf("/metrics lacks %s:\n%s", line, metrics)
		}
	}
	if err := m.Restore(5); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 8)
	if code, text := a.get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d %s", code, text)
	}
}

func TestHungDriverDelaysNoAnswers(t *testing.T) {
	t.Parallel()
	m, k := simdriver.StartParallel(t, "h100x8"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--health-period=200ms", "--call-deadline=1s")...)
	a.awaitHealthy(k, 8)
	if err := m.Hang(simdriver.GPU(3), "*"); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	if _, err := k.Allocate(a.ctx, gpuResource, m.UUID(0)); err != nil {
		t.Error(err)
	}
	if code, text := a.get("/healthz"); code != http.StatusOK {
		t.Errorf("/healthz: %d %s", code, text)
	}
}

func TestKilledAgentLeavesNothingThatHurts(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	a := start(t, on(m.Root, k)...)
	a.awaitHealthy(k, 1)
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	a.ended()
	left, _ := filepath.Glob(filepath.Join(filepath.Dir(k.Socket()), "tandem-*"))
	if len(left) != 1 {
		t.Fatalf("sockets of a killed agent: %v", left)
	}
	next := start(t, on(m.Root, k)...)
	next.awaitHealthy(k, 1)
	if _, err := os.Stat(left[0]); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("stale socket stays: %v", err)
	}
}

func TestNodeWithoutDriverIsReadyAndWaits(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	if err := m.Hide(); err != nil {
		t.Fatal(err)
	}
	a := start(t, on(m.Root, k)...)
	a.awaitReady("no driver: libnvidia-ml.so.1 is not in")
	if n := len(k.Registrations()); n != 0 {
		t.Errorf("%d registrations without a driver", n)
	}
	if _, metrics := a.get("/metrics"); !strings.Contains(metrics, `tandem_devices{health="healthy",resource="nvidia.com/gpu"} 0`) {
		t.Error("no series for a resource that has no unit yet")
	}
	if err := m.Unhide(); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 1)
}

func TestNodeWithoutKubeletIsNotReady(t *testing.T) {
	m := simdriver.Start(t, "t4")
	k := kubelettest.New(filepath.Join(t.TempDir(), "absent"))
	a := start(t, on(m.Root, k)...)
	a.said("waiting for the kubelet")
	if code, text := a.get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(text, "waiting for the kubelet") {
		t.Errorf("/readyz: %d %s", code, text)
	}
}

func TestReplacedDriverEndsIt(t *testing.T) {
	m, k := simdriver.Start(t, "t4"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--rescan=1s")...)
	a.awaitHealthy(k, 1)
	if err := m.SetDriver("999.1"); err != nil {
		t.Fatal(err)
	}
	if code := a.ended(); code == 0 {
		t.Error("exit code 0: nobody would start it again")
	}
	text, _ := a.log.state()
	lines := strings.Split(strings.TrimSpace(text), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "k8s-gpu: ") || !strings.Contains(last, "replaced under this process") {
		t.Errorf("last words: %s", last)
	}
}

func TestMixedMIG(t *testing.T) {
	m, k := simdriver.Start(t, "a100-mig"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--mig-strategy=mixed", "--pass-device-specs", "--dev-root="+m.Root)...)
	a.awaitReady("nvidia.com/mig-")
	for _, r := range k.Registrations() {
		if err := k.Await(a.ctx, "devices of "+r.Resource, func() bool { _, n := k.Capacity(r.Resource); return n > 0 }); err != nil {
			t.Fatal(err)
		}
		devices, _ := k.Devices(r.Resource)
		response, err := k.Allocate(a.ctx, r.Resource, devices[0].GetID())
		if err != nil {
			t.Fatal(err)
		}
		caps := 0
		for _, d := range response.GetDevices() {
			if _, err := os.Stat(d.GetHostPath()); err != nil {
				t.Errorf("%s: %v", r.Resource, err)
			}
			if strings.HasPrefix(d.GetContainerPath(), "/dev/nvidia-caps/") {
				caps++
			}
		}
		if want := 2; strings.Contains(r.Resource, "mig-") && caps != want || len(response.GetDevices()) < 3 {
			t.Errorf("%s: nodes %v", r.Resource, response.GetDevices())
		}
	}
}

func TestMisconfigurationIsOneLineAndAFailure(t *testing.T) {
	file := func(text string) string {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, c := range map[string]struct {
		args []string
		env  string
		want string
	}{
		"flag":            {args: []string{"--driver-rot=/"}, want: "unknown flag --driver-rot: did you mean --driver-root?"},
		"no value":        {args: []string{"--rescan"}, want: "flag needs an argument: --rescan"},
		"duration":        {args: []string{"--rescan=soon"}, want: `--rescan = "soon": want a positive duration such as 30s`},
		"environment":     {env: "MIG_STRATEGY=some", want: `MIG_STRATEGY = "some": want none, single or mixed`},
		"unsupported":     {env: "GDS_ENABLED=true", want: `GDS_ENABLED = "true": not supported by this version: want false`},
		"XIDs":            {env: "DP_DISABLE_HEALTHCHECKS=xid", want: `DP_DISABLE_HEALTHCHECKS = "xid": want XIDs such as 48,79, or "all"`},
		"no address":      {args: []string{"--http-address=9410"}, want: `--http-address = "9410": want HOST:PORT such as :9410`},
		"unreadable file": {args: []string{"--config-file=/nowhere/c.yaml"}, want: "configuration file: open /nowhere/c.yaml: no such file or directory"},
		"misspelled key":  {args: []string{"--config-file=" + file("version: v1\nflags:\n  migStratgy: single\n")}, want: `:3: flags.migStratgy = "single": unknown key: did you mean migStrategy?`},
		"not YAML":        {args: []string{"--config-file=" + file("flags: [\n")}, want: "config.yaml: line 1: did not find expected node content"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), binary(t), c.args...)
			cmd.Env = append(os.Environ(), c.env)
			var stdout, stderr strings.Builder
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			exit := (*exec.ExitError)(nil)
			if !errors.As(err, &exit) {
				t.Fatalf("%v, want a failure", err)
			}
			if text := stderr.String(); stdout.String() != "" || strings.Count(text, "\n") != 1 || !strings.Contains(text, c.want) {
				t.Errorf("stdout %q, stderr %q; want one line with %q", stdout.String(), text, c.want)
			}
		})
	}
}

// A port that another process has is no reason to offer no GPUs.
func TestTakenPortIsTriedForAgain(t *testing.T) {
	t.Parallel()
	m, first, second := simdriver.StartParallel(t, "t4"), startKubelet(t), startKubelet(t)
	a, dir := start(t, on(m.Root, first)...), shortDir(t)
	address := a.said(`http=(\S+)`)
	began := time.Now()
	b := start(t, append(on(m.Root, second), "--state-dir="+dir, "--http-address="+address)...)
	b.awaitHealthy(second, 1)
	b.said(`level=WARN msg="HTTP server unavailable, retrying" .*address already in use`)
	says(t, dir, "no HTTP at "+address+": listen tcp", "inspect")
	b.await("some tries more", func() bool { return time.Since(began) > 4*time.Second })
	if n := b.times("HTTP server unavailable"); n != 1 {
		t.Errorf("the same trouble is logged %d times", n)
	}
	a.signal(syscall.SIGTERM)
	a.ended()
	b.said(`msg=listening http=` + regexp.QuoteMeta(address))
	b.awaitReady("offered to the kubelet: nvidia.com/gpu")
	if out, err := ask(t, dir, "inspect"); err != nil || strings.Contains(out, "no HTTP") {
		t.Errorf("%v:\n%s", err, out)
	}
}
