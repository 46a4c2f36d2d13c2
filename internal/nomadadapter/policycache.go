package nomadadapter

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/renameio/v2"

	"github.com/tandem-gpu/tandem/internal/policy"
)

// KeepPolicyFor has the plugin keep the policy that is in force in the state directory, for another process of the
// same Nomad agent's. Call it before serving, with a text that differs for each start of each agent; without it, or
// with "", nothing is kept.
//
//	agent    starts    SetConfig: the file is good .................... SetConfig: the file is bad
//	plugin   process 1 ......... HUP: bad, the old stays; a crash       process 2: the old stays
//	operator          edits the file
//
// Without it process 2 would fail, and Nomad would neither try again nor take the devices from the node until the
// agent restarts (client/devicemanager/instance.go: "dispensing plugin failed"). An agent that starts is another
// matter: it has to be told, and does not start.
func (p *Plugin) KeepPolicyFor(agent string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.agent = agent
}

// startedBy is the agent for which policies are kept; "" = none are.
func (p *Plugin) startedBy() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.agent
}

// policyCacheName is the copy of a policy file in the state directory: a first line that says whose it is, and the text.
const policyCacheName = "nomad-gpu.policy.yaml"

func keptLine(agent, file string) string {
	return strings.ReplaceAll("# "+file+" as it is in force for "+agent, "\n", " ") + "\n"
}

// keep has the policy that is in force written to disk, as it was read. A disk can hang, so this does not wait for it.
// Call it with p.mu held.
func (p *Plugin) keep() {
	dir := p.settings.Health.StateDir
	if p.agent == "" || !p.fresh || p.file.Text == "" || dir == "" {
		return
	}
	copied := slices.Concat([]byte(keptLine(p.agent, p.block.PolicyFile)), []byte(p.file.Text))
	p.newest.Store(&copied)
	p.diskWork.Go(func() { p.write(filepath.Join(dir, policyCacheName), &copied) })
}

// write writes a copy unless a later one is to be kept. One write at a time: the later must not be overtaken.
func (p *Plugin) write(path string, copied *[]byte) {
	p.writing.Lock()
	defer p.writing.Unlock()
	if p.newest.Load() != copied {
		return
	}
	if was, err := os.ReadFile(path); err == nil && bytes.Equal(was, *copied) {
		return
	}
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = renameio.WriteFile(path, *copied, 0o600)
	}
	if err != nil {
		p.log.Warn("the policy is not kept: a process that follows this one needs a good policy file", "error", err)
	}
}

// kept are the settings of a block whose policy file has become bad, under the policy that was in force before in
// another process of the same agent's.
func (b block) kept(agent string) (s Settings, file policy.Result, ok bool) {
	health, _ := healthValues(b.health)
	if agent == "" || b.PolicyFile == "" || health.StateDir == "" {
		return s, file, false
	}
	path := filepath.Join(health.StateDir, policyCacheName)
	text, err := os.ReadFile(path)
	if err != nil || !strings.HasPrefix(string(text), keptLine(agent, b.PolicyFile)) {
		return s, file, false
	}
	b.PolicyFile = path
	s, file, err = b.compile(text)
	return s, file, err == nil
}
