package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hashicorp/nomad/plugins/base"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// process is a running device plugin that has listed its devices.
type process struct {
	pid   int
	calls []call // the first does nothing
	stop  func()
}

// startTimeout is for the first list.
const startTimeout = 30 * time.Second

// isNomadPlugin reports whether a binary is a plugin of go-plugin: it prints a line with the address of its socket.
func isNomadPlugin(ctx context.Context, binary string) bool {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = append(os.Environ(), base.Handshake.MagicCookieKey+"="+base.Handshake.MagicCookieValue)
	out, _ := cmd.Output() // it is killed
	return strings.HasPrefix(string(out), strconv.Itoa(1)+"|")
}

func startNomad(ctx context.Context, setup rig.Setup, s subject, _ string) (*process, error) {
	client, err := rig.StartNomad(ctx, s.binary, setup, io.Discard)
	if err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := client.Await(wait, "devices", func(seen map[string]rig.View) bool { return len(seen) > 0 }); err != nil {
		client.Stop()
		return nil, err
	}
	two := first(client.Devices(), 2)
	pid, err := strconv.Atoi(client.PID())
	return &process{pid: pid, stop: client.Stop, calls: []call{
		{"PluginInfo", client.Ping},
		{"Reserve of 2", func() error { _, err := client.Reserve(two...); return err }},
	}}, err
}

func startKubelet(ctx context.Context, setup rig.Setup, s subject, dir string) (*process, error) {
	if setup.Peer && os.Geteuid() != 0 {
		return nil, errors.New("a kubelet device plugin of others needs root: it gets a mount namespace")
	}
	k, err := rig.StartKubelet(dir, s.binary, setup, io.Discard)
	if err != nil {
		return nil, err
	}
	stop := func() { _ = k.End() }
	const resource = "nvidia.com/gpu"
	wait, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := k.Await(wait, "devices", func() bool { d, _ := k.Devices(resource); return len(d) > 0 }); err != nil {
		stop()
		return nil, err
	}
	plugin, err := k.Plugin(resource)
	if err != nil {
		stop()
		return nil, err
	}
	all := first(k.View(ctx), 8)
	return &process{pid: k.PID(), stop: stop, calls: []call{
		{"GetDevicePluginOptions", func() error { _, err := plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); return err }},
		{"Allocate of 2", func() error { _, err := k.Allocate(ctx, resource, all[:2]...); return err }},
		{"GetPreferredAllocation of 4", func() error { _, err := k.Prefer(ctx, resource, all, nil, 4); return err }},
	}}, nil
}

// first are the first IDs of n devices.
func first(seen map[string]rig.View, n int) (ids []string) {
	for id := range seen {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids[:min(n, len(ids))]
}

// memory is that of the process now (proc(5), smaps_rollup). The simulated driver's is in it.
func (p *process) memory() (figures []figure, err error) {
	text, err := os.ReadFile(p.path("smaps_rollup"))
	for _, key := range []struct{ key, name string }{{"Rss", "resident"}, {"Anonymous", "anonymous"}, {"Pss", "proportional"}} {
		_, rest, _ := strings.Cut(string(text), "\n"+key.key+":")
		var kb float64
		_, _ = fmt.Sscan(rest, &kb) // 0: the kernel does not have it
		figures = append(figures, figure{key.name, "MiB", kb / 1024})
	}
	return figures, err
}

func (p *process) path(name string) string { return filepath.Join("/proc", strconv.Itoa(p.pid), name) }

// settle is longer than the time between two checks: what came before has ended.
const settle = 12 * time.Second

// idle measures a time without a request, with all GPUs healthy and with one lost. The figures are those of a minute.
func (p *process) idle(m *simdriver.Machine, d time.Duration) ([]figure, error) {
	healthy, err := p.minute(m, d, "idle minute")
	if err != nil {
		return nil, err
	}
	slots, err := m.Slots()
	if err != nil {
		return nil, err
	}
	if err := m.Lose(slots[len(slots)/2]); err != nil {
		return nil, err
	}
	lost, err := p.minute(m, d, "idle minute, one GPU lost")
	return slices.Concat(healthy, lost), err
}

func (p *process) minute(m *simdriver.Machine, d time.Duration, name string) ([]figure, error) {
	time.Sleep(settle)
	before, err := p.spent(m)
	if err != nil {
		return nil, err
	}
	time.Sleep(d)
	after, err := p.spent(m)
	for i := range after {
		after[i].value = (after[i].value - before[i].value) / d.Minutes()
		after[i].name = name + ": " + after[i].name
	}
	return after, err
}

// spent is what the process has cost so far.
func (p *process) spent(m *simdriver.Machine) ([]figure, error) {
	cpu, err := p.cpu()
	if err != nil {
		return nil, err
	}
	wakeups, err := p.wakeups()
	if err != nil {
		return nil, err
	}
	calls, err := m.CallsOf(p.pid)
	if err != nil {
		return nil, err
	}
	var all, waits float64
	for name, n := range calls {
		all += float64(n)
		if strings.HasPrefix(name, "nvmlEventSetWait") {
			waits += float64(n)
		}
	}
	return []figure{{"CPU", "ms", cpu}, {"waits of threads", "", wakeups}, {"driver calls", "", all}, {"of them event waits", "", waits}}, nil
}

// cpu is the CPU time in milliseconds (proc(5), /proc/PID/stat: utime and stime, in ticks of 10 ms).
func (p *process) cpu() (ms float64, err error) {
	stat, err := os.ReadFile(p.path("stat"))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	for _, field := range strings.Fields(rest)[11:13] {
		n, err := strconv.Atoi(field)
		if err != nil {
			return 0, err
		}
		ms += float64(n) * 10
	}
	return ms, nil
}

// wakeups is how often threads have waited, and so were woken (proc(5), voluntary_ctxt_switches). Those of ended threads are lost.
func (p *process) wakeups() (n float64, err error) {
	threads, err := filepath.Glob(p.path("task/*/status"))
	for _, path := range threads {
		text, _ := os.ReadFile(path) // the thread may have ended
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		var switches float64
		_, _ = fmt.Sscan(rest, &switches)
		n += switches
	}
	return n, err
}
