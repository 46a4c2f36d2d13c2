package nomadadapter

import (
	"context"
	"reflect"
	"strings"

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

// logRefused logs each error of an invalid policy.
func (p *Plugin) logRefused(b config.Block, err error) {
	for line := range strings.Lines(err.Error()) {
		p.log.Error("policy refused", "problem", strings.TrimSuffix(line, "\n"))
	}
	p.log.Error("policy refused, previous policy remains in effect", "file", b.PolicyFile)
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
