// Package nomad has the checks of doctor that are about the Nomad agent: whether it loads the plugin, and with which configuration.
package nomad

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
)

// Options are what the checks need. The zero value is the node that this process runs on.
type Options struct {
	ProcRoot string // "" = /proc
	// Version returns the version of a Nomad executable, "" if it is not known; nil = by its build information.
	Version func(executable string) string
}

// Checks are the checks.
func Checks(o Options) []doctor.Check {
	return []doctor.Check{{Name: check, Place: "configuration of the Nomad agent", Look: o.look}}
}

const check = "nomad"

// defaultConfig is where HashiCorp's packages have the configuration.
const defaultConfig = "/etc/nomad.d"

func finding(s doctor.Severity, place, found, remedy string) doctor.Finding {
	return doctor.Finding{Check: check, Severity: s, Place: place, Found: found, Remedy: remedy}
}

func problem(place, found, remedy string) []doctor.Finding {
	return []doctor.Finding{finding(doctor.Problem, place, found, remedy)}
}

// agentProcess is a running "nomad agent"; ok is false if none is visible.
func agentProcess(f *doctor.Facts) (p doctor.Process, ok bool) {
	for _, p := range f.Running("nomad") {
		if slices.Contains(p.Args, "agent") {
			return p, true
		}
	}
	return p, false
}

func (o Options) proc(pid int, name string) string {
	return filepath.Join(cmp.Or(o.ProcRoot, "/proc"), strconv.Itoa(pid), name)
}

// commandLine is that of the running agent, or else one with the configuration of HashiCorp's packages.
func (o Options) commandLine(f *doctor.Facts) (line commandLine, process doctor.Process, running bool) {
	if process, running = agentProcess(f); !running {
		return commandLine{configs: []string{defaultConfig}}, process, false
	}
	line = parseCommandLine(process.Args[1:])
	line.workDir, _ = os.Readlink(o.proc(process.PID, "cwd"))
	return line, process, true
}

// blockTimeout limits Block.
const blockTimeout = 2 * time.Second

// Block returns the keys of the plugin's config block in the configuration of the Nomad agent of this node; nil if there is none, or
// if it can't be read in time.
func Block(hostRoot, procRoot string) map[string]any {
	ctx, cancel := context.WithTimeout(context.Background(), blockTimeout)
	defer cancel()
	result := make(chan map[string]any, 1)
	go func() {
		o := Options{ProcRoot: procRoot}
		f := &doctor.Facts{Processes: doctor.Processes(ctx, cmp.Or(procRoot, "/proc"))}
		f.HostRoot = hostRoot
		line, _, _ := o.commandLine(f)
		c, err := line.read(f)
		if err != nil || c.folder() == "" {
			result <- nil
			return
		}
		for _, label := range c.labels() {
			if p := c.Plugins[label]; p.Config != nil && identify(host(f, filepath.Join(c.folder(), label))) == ownProgram {
				result <- flat(p.Config)
				return
			}
		}
		result <- nil
	}()
	select {
	case keys := <-result:
		return keys
	case <-ctx.Done():
		return nil
	}
}

func (o Options) look(_ context.Context, f *doctor.Facts) []doctor.Finding {
	line, process, running := o.commandLine(f)
	var findings []doctor.Finding
	if !running {
		if _, err := os.Stat(host(f, defaultConfig)); err != nil {
			return []doctor.Finding{finding(doctor.Warning, "processes, "+defaultConfig, "no Nomad agent runs here, and there is no configuration of one",
				"start the Nomad client, which starts this plugin; in a container or as another user it is not visible")}
		}
		findings = append(findings, finding(doctor.Warning, "processes", "no Nomad agent runs here, or it is not visible; its configuration is taken from "+defaultConfig, "systemctl status nomad"))
	}
	c, err := line.read(f)
	if err != nil {
		return append(findings, finding(doctor.Problem, strings.Join(line.configs, ", "), "the configuration of the Nomad agent can't be read: "+err.Error(), "correct it; run doctor as root"))
	}
	broken := o.plugin(f, c)
	if broken == nil {
		broken = o.docker(f, c, process)
	}
	if findings = append(findings, broken...); len(findings) == 0 {
		findings = []doctor.Finding{finding(doctor.OK, c.folder(), "the Nomad agent loads the plugin", "")}
	}
	return findings
}

// plugin checks that Nomad loads the plugin (helper/pluginutils/loader/init.go): the first reason why it does not.
func (o Options) plugin(f *doctor.Facts, c agentConfig) []doctor.Finding {
	files := strings.Join(c.Files, ", ")
	if files == "" {
		files = "flags of the Nomad agent"
	}
	folder := c.folder()
	switch {
	case !c.Client:
		return problem(files, "the Nomad agent is no client, so it loads no plugin", "client { enabled = true }, and restart it")
	case folder == "":
		return problem(files, "there is no plugin_dir, and no data_dir beneath which it would be", `plugin_dir = "/opt/nomad/plugins" (or -plugin-dir), put the plugin there, and restart Nomad`)
	case !filepath.IsAbs(folder):
		return problem(files, fmt.Sprintf("plugin_dir = %q is not an absolute path: the Nomad agent does not start", folder), "give the absolute path")
	}
	entries, err := os.ReadDir(host(f, folder))
	if errors.Is(err, fs.ErrNotExist) {
		return problem(folder, "the plugin_dir does not exist, and Nomad loads no plugin", "mkdir "+folder+", put nomad-gpu there, and restart Nomad")
	} else if err != nil {
		return problem(folder, "the plugin_dir can't be read: "+err.Error(), "run doctor as root")
	}
	var own, incumbent []string
	for _, e := range entries {
		path := filepath.Join(folder, e.Name())
		if _, err := os.Stat(host(f, path)); errors.Is(err, fs.ErrNotExist) {
			return problem(path, e.Name()+" is a symbolic link to a file that does not exist: the Nomad agent does not start with it", "remove it, or install the file")
		}
		switch identify(host(f, path)) {
		case ownProgram:
			own = append(own, e.Name())
		case incumbentProgram:
			incumbent = append(incumbent, e.Name())
		case otherProgram:
		}
	}
	if len(own) == 0 {
		return problem(folder, "the plugin_dir has no nomad-gpu", "put it there: install -m 0755 nomad-gpu "+folder+"/; then restart Nomad")
	}
	return o.loaded(f, c, own, incumbent)
}

// loaded checks the files of the plugin in its folder, and their blocks.
func (o Options) loaded(f *doctor.Facts, c agentConfig, own, incumbent []string) []doctor.Finding {
	folder, files := c.folder(), strings.Join(c.Files, ", ")
	name, labelled := own[0], false
	for _, n := range own {
		if _, ok := c.Plugins[n]; ok && !labelled {
			name, labelled = n, true
		}
	}
	path := filepath.Join(folder, name)
	info, err := os.Stat(host(f, path))
	if err == nil && info.Mode()&0o111 == 0 {
		return problem(path, "the plugin is not executable, so Nomad skips it", "chmod 0755 "+path+", and restart Nomad")
	}
	if !labelled {
		found := fmt.Sprintf("no block plugin %q, so Nomad skips the file of this name", name)
		if labels := c.labels(); len(labels) > 0 {
			found += "; there are: " + strings.Join(labels, ", ")
		}
		return problem(files, found, fmt.Sprintf("name the block after the file: plugin %q { config {} }, and restart Nomad", name))
	}
	for _, n := range incumbent {
		if _, ok := c.Plugins[n]; ok {
			return problem(filepath.Join(folder, n), "nomad-device-nvidia is loaded, too, and offers the same GPUs", "remove its file and its block, and restart Nomad")
		}
	}
	p := c.Plugins[name]
	if len(p.Unknown) > 0 {
		return problem(files, fmt.Sprintf("plugin %q: %s: Nomad ignores keys outside of config", name, strings.Join(p.Unknown, ", ")), "move them into config { ... } in the block, and restart Nomad")
	}
	return blockProblems(files, name, p)
}

// blockProblems are the problems of the plugin's own keys.
func blockProblems(files, name string, p plugin) (findings []doctor.Finding) {
	keys := flat(p.Config)
	if fmt.Sprint(keys["enabled"]) == "false" {
		return problem(files, fmt.Sprintf("plugin %q: enabled = false: it offers nothing", name), "enabled = true, and restart Nomad")
	}
	known := config.NomadKeys()
	for key := range keys {
		if !slices.Contains(known, key) {
			findings = append(findings, finding(doctor.Problem, files, fmt.Sprintf("plugin %q: config has no key %q: the Nomad agent does not start", name, key), "correct or remove it; the keys are in docs/configuration.md"))
		}
	}
	if _, _, err := config.NewBlock(keys).Read(); err != nil {
		for line := range strings.Lines(err.Error()) {
			findings = append(findings, finding(doctor.Problem, files, fmt.Sprintf("plugin %q: %s", name, strings.TrimSpace(line)), "correct it, and restart Nomad"))
		}
	}
	slices.SortFunc(findings, func(a, b doctor.Finding) int { return strings.Compare(a.Found, b.Found) })
	return findings
}
