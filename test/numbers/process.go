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
		{fmt.Sprintf("Reserve of %d", len(two)), func() error { _, err := client.Reserve(two...); return err }},
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
	two, four := all[:min(2, len(all))], min(4, len(all))
	return &process{pid: k.PID(), stop: stop, calls: []call{
		{"GetDevicePluginOptions", func() error { _, err := plugin.GetDevicePluginOptions(ctx, &v1beta1.Empty{}); return err }},
		{fmt.Sprintf("Allocate of %d", len(two)), func() error { _, err := k.Allocate(ctx, resource, two...); return err }},
		{fmt.Sprintf("GetPreferredAllocation of %d", four), func() error { _, err := k.Prefer(ctx, resource, all, nil, four); return err }},
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

// memory is that of the process now (proc(5), smaps_rollup). The driver's library is in it.
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
