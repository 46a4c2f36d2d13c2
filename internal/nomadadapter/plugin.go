package nomadadapter

import (
	"context"
	"fmt"
	"iter"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// pluginName is the plugin's name in Nomad, the same as nomad-device-nvidia's: if both are installed, Nomad uses the one with
// the higher version instead of fingerprinting every GPU twice.
const pluginName = "nvidia-gpu"

// Source is the inventories and the usage of a node; a *monitor.Monitor is one. Its methods are called concurrently.
type Source interface {
	Current() *inventory.Allocatable
	Watch(context.Context) iter.Seq[*inventory.Allocatable]
	Usage(context.Context) ([]gpu.Usage, error)

	// ApplyPolicy applies the policy and MIG strategy of another configuration without a new session. It fails only if
	// ctx ends.
	ApplyPolicy(ctx context.Context, c core.Config) error

	// CheckReservation is called with the units of each reservation before it succeeds. It returns what is logged, or an error that
	// fails the reservation. It must not block.
	CheckReservation(units []inventory.Unit) ([]inventory.Finding, error)

	// Reserved is called with the devices of each reservation, while Nomad waits. It must not block.
	Reserved([]gpu.Device)
}

// StartFunc starts a Source that runs until ctx ends. It must not block.
type StartFunc func(ctx context.Context, s Settings, log *slog.Logger) Source

// Plugin is the device plugin. Make one with New; all methods are safe for concurrent use.
type Plugin struct {
	version string
	log     *slog.Logger
	start   func(Settings) *run
	names   groupNamer // for all runs: allocations remain when the configuration changes

	counters counters
	streams  streams
	reloads  ReloadObserver

	diskWork      sync.WaitGroup                    // goroutines that read or write the state directory
	readFile      func(path string) ([]byte, error) // readGroupFile, but in tests
	policyWrite   sync.Mutex                        // held during a write of the policy
	unsavedPolicy atomic.Pointer[[]byte]            // the latest policy to be saved

	mu        sync.Mutex
	agent     string                                // for which the policy is saved; "" = it is not
	bootID    func(procRoot string) (string, error) // nil = group names are not saved
	block     config.Block
	settings  Settings    // by block
	policy    config.File // by the policy file of block
	fromCache bool        // policy is that of an earlier process, because the policy file is invalid
	warned    string      // the policy file whose warnings were logged; "" = none
	run       *run        // nil until the first call that concerns devices
}

var _ device.DevicePlugin = (*Plugin)(nil)

// run is one source, from its start until the configuration requires another one. It is immutable.
type run struct {
	source   Source
	enabled  bool
	settings Settings
	done     <-chan struct{} // closed by stop
	stop     func()
}

// New returns a plugin that reports version to Nomad, and whose sources start runs until ctx ends.
func New(ctx context.Context, version string, start StartFunc, log hclog.Logger) *Plugin {
	p := &Plugin{version: version, log: slog.New(hclogHandler{log: log})}
	p.block, p.readFile, p.reloads = config.NewBlock(nil), readGroupFile, ignoredReloads{}
	p.counters.observe = func(string, time.Duration) {}
	p.settings, _, _ = p.block.Read() // the defaults are valid: TestSettings
	p.start = func(s Settings) *run {
		ctx, stop := context.WithCancel(ctx)
		return &run{source: start(ctx, s, p.log), enabled: true, settings: s, done: ctx.Done(), stop: stop}
	}
	return p
}

// PluginInfo returns the plugin's name and versions. Nomad calls it before SetConfig.
func (p *Plugin) PluginInfo() (*base.PluginInfoResponse, error) {
	return &base.PluginInfoResponse{
		Type:              base.PluginTypeDevice,
		PluginApiVersions: []string{device.ApiVersion010},
		PluginVersion:     p.version,
		Name:              pluginName,
	}, nil
}

// ConfigSchema returns the keys of the config block.
func (p *Plugin) ConfigSchema() (*hclspec.Spec, error) { return blockSchema, nil }

// SetConfig sets the config block. An error stops the Nomad agent from starting and is shown to the operator, so errors
// concern the block only, never the state of the node. An equal configuration has no effect; another one ends the source,
// and open streams continue with the next one. A policy file that became invalid while the agent runs is no error: see
// PersistPolicy.
func (p *Plugin) SetConfig(c *base.Config) error {
	b, err := decode(c.PluginConfig)
	if err != nil {
		return fmt.Errorf("decode config: %w", err)
	}
	s, file, invalid := b.Read()
	if invalid != nil {
		var ok bool
		if s, file, ok = cachedSettings(b, p.persistentAgent()); !ok {
			return invalid
		}
		p.logRefused(b, invalid)
	} else {
		p.reloads.Loaded(time.Now())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	same := b.Enabled == p.block.Enabled && reflect.DeepEqual(s, p.settings)
	p.block, p.settings, p.policy, p.fromCache = b, s, file, invalid != nil
	if same {
		p.logWarnings()
		return nil
	}
	p.stopRun()
	return nil
}

// stopRun ends the current run; the next call of currentRun starts another one. The caller holds p.mu.
func (p *Plugin) stopRun() {
	if p.run != nil {
		p.run.stop()
		p.run = nil
	}
}

// currentRun returns the current run, and starts it if there is none: the process that Nomad starts to validate the
// configuration makes no call that concerns devices, and so does not open the driver.
func (p *Plugin) currentRun() *run {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.run == nil && p.block.Enabled {
		p.run = p.start(p.settings)
		p.savePolicy()
		p.logWarnings()
		p.saveGroups(p.run)
	}
	if p.run == nil {
		done := make(chan struct{})
		p.run = &run{source: disabledSource{}, settings: p.settings, done: done, stop: func() { close(done) }}
	}
	return p.run
}

// logWarnings logs where the policy file has another effect than with NVIDIA's plugin, once for each text of the file, and
// not in the process that only validates the configuration. The caller holds p.mu.
func (p *Plugin) logWarnings() {
	if p.run == nil || !p.run.enabled || p.policy.Text == p.warned {
		return
	}
	p.warned = p.policy.Text
	for _, w := range p.policy.Warnings {
		p.log.Warn("policy differs in effect from NVIDIA's k8s-device-plugin", "warning", w)
	}
}

// disabledSource is the source of a disabled plugin: a node without a driver.
type disabledSource struct{}

var disabledInventory = core.Build(gpu.NoDriver(gpu.DriverAbsent, "disabled by configuration"), health.Ledger{}, core.DefaultConfig()).WithoutHost()

func (disabledSource) Current() *inventory.Allocatable { return disabledInventory }

func (disabledSource) Watch(ctx context.Context) iter.Seq[*inventory.Allocatable] {
	return func(yield func(*inventory.Allocatable) bool) {
		if yield(disabledInventory) {
			<-ctx.Done()
		}
	}
}

func (disabledSource) Usage(context.Context) ([]gpu.Usage, error)     { return nil, nil }
func (disabledSource) ApplyPolicy(context.Context, core.Config) error { return nil }
func (disabledSource) Reserved([]gpu.Device)                          {}

func (disabledSource) CheckReservation([]inventory.Unit) ([]inventory.Finding, error) {
	return nil, nil
}

// watchdogOf returns the watchdog of the source, with which the loops that read it are registered; nil = none.
func watchdogOf(src Source) *watchdog.Registry {
	if s, ok := src.(interface{ Watchdog() *watchdog.Registry }); ok {
		return s.Watchdog()
	}
	return nil
}

// withDone returns a context that ends with ctx or when done is closed. Cancel it.
func withDone(ctx context.Context, done <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-done:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// awaitFirstSnapshot returns the first inventory that is not provisional, or the current one when ctx ends.
func awaitFirstSnapshot(ctx context.Context, src Source) *inventory.Allocatable {
	for inv := range src.Watch(ctx) {
		if !inv.Provisional() {
			return inv
		}
	}
	return src.Current()
}
