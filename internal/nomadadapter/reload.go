package nomadadapter

import (
	"context"
	"reflect"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/policy"
)

// PolicyApplier is a Source that can go on with another offer: policy, MIG strategy. It fails only with ctx.
type PolicyApplier interface {
	ApplyPolicy(ctx context.Context, offer core.Config) error
}

// Reload reads the policy file again. What it says takes effect in place: sessions, streams and what is known of
// health stay. If anything is wrong with it, every problem is logged and the old policy stays in force, all of it;
// Nomad never sees an error.
func (p *Plugin) Reload(ctx context.Context) {
	p.mu.Lock()
	b := p.block
	p.mu.Unlock()
	if b.PolicyFile == "" {
		return
	}
	s, file, err := b.settings() // without the lock: where the file is may hang
	if err != nil {
		p.refused(b, err)
		return
	}
	l, changed := p.replace(b, s, file)
	p.log.Info("policy read again", "file", b.PolicyFile, "changed", changed)
	if l == nil {
		return
	}
	ctx, cancel := withDone(ctx, l.done)
	defer cancel()
	if err := l.source.(PolicyApplier).ApplyPolicy(ctx, s.Core); err != nil {
		p.log.Warn("policy not in force yet", "error", err)
	}
}

// refused says everything that is wrong with a policy that does not come into force.
func (p *Plugin) refused(b block, err error) {
	for line := range strings.Lines(err.Error()) {
		p.log.Error("policy refused", "problem", strings.TrimSuffix(line, "\n"))
	}
	p.log.Error("policy refused: the old one stays in force, all of it", "file", b.PolicyFile)
}

// replace has the settings of a block replaced, and returns the life that has to adopt them. None has to if nothing
// changed, if another block came meanwhile, or if a new life begins: it does if its source can't, or if more changed
// than the offer.
func (p *Plugin) replace(b block, s Settings, file policy.Result) (adopting *run, changed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !reflect.DeepEqual(b, p.block) {
		return nil, false
	}
	p.file, p.fresh = file, true
	p.logWarnings()
	if reflect.DeepEqual(s, p.settings) {
		return nil, false
	}
	was := p.settings
	p.settings = s
	p.keep()
	if p.run == nil || !p.run.enabled {
		return nil, true
	}
	was.Core.Policy, was.Core.MIG = s.Core.Policy, s.Core.MIG
	if _, can := p.run.source.(PolicyApplier); !can || !reflect.DeepEqual(was, s) {
		p.stopRun()
		return nil, true
	}
	next := *p.run
	next.settings = s
	p.run = &next
	return p.run, true
}
