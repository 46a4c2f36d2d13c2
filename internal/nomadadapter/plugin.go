package nomadadapter

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/policy"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Name is the plugin's identity in Nomad. It is nomad-device-nvidia's: should both be installed, Nomad
// keeps the one of the higher version instead of offering every GPU twice.
const Name = "nvidia-gpu"

// Source is what the plugin needs of the core. Its methods are called from many goroutines.
type Source interface {
	Current() *core.Inventory
	Watch(context.Context) iter.Seq[*core.Inventory]
	Usage(context.Context) ([]core.Usage, error)
}

// watchdogOf is where the loops that serve a source beat; nil = nowhere. A monitor has one.
func watchdogOf(src Source) *watchdog.Registry {
	if p, ok := src.(interface{ Watchdog() *watchdog.Registry }); ok {
		return p.Watchdog()
	}
	return nil
}

// StartFunc starts following the machine until ctx ends. It returns at once.
type StartFunc func(ctx context.Context, s Settings, log *slog.Logger) Source

// Plugin is the device plugin. Make one with New; all methods are safe for concurrent use.
type Plugin struct {
	version string
	log     *slog.Logger
	start   func(Settings) *run
	names   groupNamer // one for all lives: tasks run on while a configuration changes

	diskWork    sync.WaitGroup                    // of what is at the disk
	writing    sync.Mutex                        // held by the one that is at the disk
	readFile func(path string) ([]byte, error) // the file of announced names; tests have it fail
	newest     atomic.Pointer[[]byte]            // the latest copy of the policy that is to be kept

	mu       sync.Mutex
	agent    string                                // for which the policy is kept; "" = it is not
	bootID   func(procRoot string) (string, error) // nil = names of groups are not kept
	block    block
	settings Settings      // what the block says
	file     policy.Result // what its policy file says
	warned   string        // text of the policy file of which the warnings are logged; "" = of none
	fresh    bool          // by its policy file and not by one that was kept
	run     *run         // nil until someone asks about devices
}

var _ device.DevicePlugin = (*Plugin)(nil)

// run is a source from its start until a configuration that asks for another one. It is immutable.
type run struct {
	source   Source
	enabled  bool
	settings Settings
	done    <-chan struct{}
	stop      context.CancelFunc
}

// New returns a plugin that reports version and has start follow the machine until ctx ends.
func New(ctx context.Context, version string, start StartFunc, log hclog.Logger) *Plugin {
	p := &Plugin{version: version, log: slog.New(hclogHandler{log: log})}
	p.block, p.readFile = defaultBlock(), readGroupFile
	p.settings, _, _ = p.block.compile(nil) // the defaults are valid; a test says so
	p.start = func(s Settings) *run {
		ctx, end := context.WithCancel(ctx)
		return &run{source: start(ctx, s, p.log), enabled: true, settings: s, done: ctx.Done(), stop: end}
	}
	return p
}

// PluginInfo says who we are. Nomad calls it before anything is configured.
func (p *Plugin) PluginInfo() (*base.PluginInfoResponse, error) {
	return &base.PluginInfoResponse{
		Type:              base.PluginTypeDevice,
		PluginApiVersions: []string{device.ApiVersion010},
		PluginVersion:     p.version,
		Name:              Name,
	}, nil
}

// ConfigSchema says which keys the config block has.
func (p *Plugin) ConfigSchema() (*hclspec.Spec, error) { return schema, nil }

// SetConfig takes the config block. An error stops the Nomad agent from starting and is shown to the
// operator, so it concerns the block only, never the state of the machine. The same configuration again
// changes nothing; another one ends the source, and open streams go on with the next. A policy file that has become bad
// under a running agent is no error: see KeepPolicyFor.
func (p *Plugin) SetConfig(c *base.Config) error {
	b, err := decode(c.PluginConfig)
	if err != nil {
		return fmt.Errorf("decode config: %w", err)
	}
	s, file, wrong := b.settings()
	if wrong != nil {
		var ok bool
		if s, file, ok = b.kept(p.startedBy()); !ok {
			return wrong
		}
		p.refused(b, wrong)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	same := b.Enabled == p.block.Enabled && reflect.DeepEqual(s, p.settings)
	p.block, p.settings, p.file, p.fresh = b, s, file, wrong == nil
	if same {
		p.logWarnings()
		return nil
	}
	p.stopRun()
	return nil
}

// stopRun ends the present life; the next call of now begins another.
func (p *Plugin) stopRun() {
	if p.run != nil {
		p.run.stop()
		p.run = nil
	}
}

// currentRun returns the present life, which begins with the first call: the process that Nomad starts just to
// validate the configuration never asks, and so never opens the driver.
func (p *Plugin) currentRun() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run == nil && p.block.Enabled {
		p.run = p.start(p.settings)
		p.keep()
		p.logWarnings()
		p.saveGroups(p.run)
	}
	if p.run == nil {
		ended := make(chan struct{})
		p.run = &run{source: disabledSource{}, settings: p.settings, done: ended, stop: func() { close(ended) }}
	}
	return p.run
}

// logWarnings logs what the policy file means otherwise than to NVIDIA's plugin, once for each text of the file: when devices
// are followed, so that the process that only validates the configuration says nothing. Callers hold p.mu.
func (p *Plugin) logWarnings() {
	if p.run == nil || !p.run.enabled || p.file.Text == p.warned {
		return
	}
	p.warned = p.file.Text
	for _, w := range p.file.Warnings {
		p.log.Warn("policy differs in effect from NVIDIA's k8s-device-plugin", "warning", w)
	}
}

// disabledSource is the source of a disabled plugin: a machine that is not looked at.
type disabledSource struct{}

var disabledInventory = core.Build(core.NoDriver(core.DriverAbsent, "disabled by configuration"), core.Ledger{}, core.DefaultConfig())

func (disabledSource) Current() *core.Inventory { return disabledInventory }

func (disabledSource) Watch(ctx context.Context) iter.Seq[*core.Inventory] {
	return func(yield func(*core.Inventory) bool) {
		if yield(disabledInventory) {
			<-ctx.Done()
		}
	}
}

func (disabledSource) Usage(context.Context) ([]core.Usage, error) { return nil, nil }

// withDone returns a context that ends with ctx or with ended, whichever is first. Cancel it.
func withDone(ctx context.Context, ended <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-ended:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// awaitFirstSnapshot waits for an inventory that is not provisional, and returns it or the latest when ctx ends.
func awaitFirstSnapshot(ctx context.Context, src Source) *core.Inventory {
	for inv := range src.Watch(ctx) {
		if !inv.Provisional() {
			return inv
		}
	}
	return src.Current()
}
