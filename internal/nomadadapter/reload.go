package nomadadapter

import (
	"context"
	"reflect"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
)

// Reload reads the policy file again and applies it: sessions, streams and the health history continue. If the file is
// invalid, all errors are logged and the previous policy remains in effect; Nomad gets no error.
func (p *Plugin) Reload(ctx context.Context) {
	p.mu.Lock()
	b := p.block
	p.mu.Unlock()
	if b.PolicyFile == "" {
		return
	}
	s, file, err := b.Read() // without the lock: the file system may hang
	if err != nil {
		p.logRefused(b, err)
		return
	}
	p.reloads.Loaded(time.Now())
	r, changed := p.replaceSettings(b, s, file)
	p.log.Info("policy reloaded", "file", b.PolicyFile, "changed", changed)
	if r == nil {
		return
	}
	ctx, cancel := withDone(ctx, r.done)
	defer cancel()
	if err := r.source.ApplyPolicy(ctx, s.Core); err != nil {
		p.log.Warn("policy not applied yet", "error", err)
	}
}

// ReloadObserver records the outcome of each read of the config block and its policy file. It is safe for concurrent use.
type ReloadObserver interface {
	Loaded(now time.Time)
	Refused(now time.Time, err error) // the policy before remains in effect
}

type ignoredReloads struct{}

func (ignoredReloads) Loaded(time.Time)         {}
func (ignoredReloads) Refused(time.Time, error) {}

// ObserveReloads makes the plugin report to o. Call it before Serve.
func (p *Plugin) ObserveReloads(o ReloadObserver) { p.reloads = o }

// logRefused logs and reports each error of an invalid policy.
func (p *Plugin) logRefused(b config.Block, err error) {
	for line := range strings.Lines(err.Error()) {
		p.log.Error("policy refused", "problem", strings.TrimSuffix(line, "\n"))
	}
	p.log.Error("policy refused, previous policy remains in effect", "file", b.PolicyFile)
	p.reloads.Refused(time.Now(), err)
}

// replaceSettings replaces the settings of block b, and returns the run whose source has to apply the policy: nil if
// nothing changed, if the block was replaced meanwhile, or if another run is needed, because more than the policy changed.
func (p *Plugin) replaceSettings(b config.Block, s Settings, file config.File) (applying *run, changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !reflect.DeepEqual(b, p.block) {
		return nil, false
	}
	p.policy, p.fromCache = file, false
	p.logWarnings()
	if reflect.DeepEqual(s, p.settings) {
		return nil, false
	}
	previous := p.settings
	p.settings = s
	p.savePolicy()
	if p.run == nil {
		return nil, true
	}
	previous.Core.Policy, previous.Core.MIG = s.Core.Policy, s.Core.MIG
	if !reflect.DeepEqual(previous, s) {
		p.stopRun()
		return nil, true
	}
	next := *p.run
	next.settings = s
	p.run = &next
	return p.run, true
}
