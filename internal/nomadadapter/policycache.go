package nomadadapter

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// policyCacheName is the copy of a policy file in the state directory: policyCacheHeader and the text.
const policyCacheName = "nomad-gpu.policy.yaml"

func policyCacheHeader(agent, file string) string {
	return strings.ReplaceAll("# "+file+" as it is in force for "+agent, "\n", " ") + "\n"
}

// PersistPolicy makes the plugin save the effective policy in the state directory, for the next plugin process of the same
// Nomad agent. agent identifies one start of one agent; with "" nothing is saved. Call it before Serve.
//
//	agent    starts    SetConfig: valid file .......................... SetConfig: invalid file
//	plugin   process 1 ......... HUP: invalid, policy unchanged; crash  process 2: policy unchanged
//	operator          edits the file
//
// Otherwise process 2 would fail, and Nomad would neither retry nor remove the devices from the node until the agent
// restarts (client/devicemanager/instance.go: "dispensing plugin failed"). An agent that starts with an invalid file
// fails, which shows the error to the operator.
func (p *Plugin) PersistPolicy(agent string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.agent = agent
}

// persistentAgent returns the agent for which policies are saved; "" = none.
func (p *Plugin) persistentAgent() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.agent
}

// savePolicy saves the effective policy file as it was read. It does not wait for the disk, which may hang. The caller
// holds p.mu.
func (p *Plugin) savePolicy() {
	dir := p.settings.Health.StateDir
	if p.agent == "" || p.fromCache || p.policy.Text == "" || dir == "" {
		return
	}
	content := slices.Concat([]byte(policyCacheHeader(p.agent, p.block.PolicyFile)), []byte(p.policy.Text))
	p.unsavedPolicy.Store(&content)
	p.diskWork.Go(func() { p.writePolicy(filepath.Join(dir, policyCacheName), &content) })
}

// savePolicyAgain saves the policy again if someone has removed the file. It waits for the disk.
func (p *Plugin) savePolicyAgain() {
	p.mu.Lock()
	dir := p.settings.Health.StateDir
	p.mu.Unlock()
	if dir == "" || !statefile.IsMissing(filepath.Join(dir, policyCacheName)) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.savePolicy()
}

// writePolicy writes content unless a later one is to be saved. One write at a time: the last must be the latest.
func (p *Plugin) writePolicy(path string, content *[]byte) {
	p.policyWrite.Lock()
	defer p.policyWrite.Unlock()
	if p.unsavedPolicy.Load() != content {
		return
	}
	if present, err := os.ReadFile(path); err == nil && bytes.Equal(present, *content) {
		return
	}
	statefile.RemoveTemporary(path)
	if err := statefile.Write(path, *content); err != nil {
		p.log.Warn("policy not saved, the next plugin process needs a valid policy file", "error", err)
	}
}

// cachedSettings returns the settings of a block with the policy that was saved for this agent in place of its policy
// file, which is invalid.
func cachedSettings(b config.Block, agent string) (s Settings, file config.File, ok bool) {
	if agent == "" || b.PolicyFile == "" || b.StateDir() == "" {
		return s, file, false
	}
	path := filepath.Join(b.StateDir(), policyCacheName)
	text, err := os.ReadFile(path)
	if err != nil || !strings.HasPrefix(string(text), policyCacheHeader(agent, b.PolicyFile)) {
		return s, file, false
	}
	s, file, err = b.Compile(path, text)
	return s, file, err == nil
}
