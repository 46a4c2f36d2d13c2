package nomad

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/nomadadapter/clientconfig"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
)

// agentConfig is what is needed of a Nomad agent's configuration.
type agentConfig struct {
	Files     []string // that were read, as paths of the host
	Client    bool     // the agent runs jobs
	Dev       bool
	DataDir   string
	PluginDir string // "" = <data_dir>/plugins
	Plugins   map[string]plugin
}

// plugin is a block plugin "LABEL".
type plugin struct {
	Config  map[string]any // nil = it has none
	Unknown []string       // keys beside config and args, sorted
}

// folder is the folder of plugins, as a path of the host; "" = there is none.
func (c agentConfig) folder() string {
	if c.PluginDir == "" && c.DataDir != "" {
		return filepath.Join(c.DataDir, "plugins")
	}
	return c.PluginDir
}

// labels are the labels of the plugin blocks, sorted.
func (c agentConfig) labels() []string { return slices.Sorted(maps.Keys(c.Plugins)) }

// commandLine are the flags of "nomad agent" that matter here (command/agent/command.go).
type commandLine struct {
	configs            []string // files and folders
	dev, client        bool
	dataDir, pluginDir string
	workDir            string // working directory of the agent
}

func parseCommandLine(args []string) (c commandLine) {
	for i := 0; i < len(args); i++ {
		name, ok := strings.CutPrefix(args[i], "-")
		if !ok {
			continue
		}
		name, value, hasValue := strings.Cut(strings.TrimPrefix(name, "-"), "=")
		switch name {
		case "config", "data-dir", "plugin-dir":
			if !hasValue && i+1 < len(args) {
				i++
				value = args[i]
			}
		}
		switch name {
		case "config":
			c.configs = append(c.configs, value)
		case "data-dir":
			c.dataDir = value
		case "plugin-dir":
			c.pluginDir = value
		case "dev", "dev-connect", "dev-consul", "dev-vault":
			c.dev = true
		case "client":
			c.client = !hasValue || value == "true"
		}
	}
	return c
}

// host returns where a path of the Nomad agent's file system is for this process.
func host(f *doctor.Facts, path string) string { return filepath.Join("/", f.HostRoot, path) }

// read reads the files of a command line in Nomad's order: a folder's *.hcl and *.json by name. Paths are relative to the working
// directory of the agent.
func (l commandLine) read(f *doctor.Facts) (agentConfig, error) {
	c := agentConfig{Plugins: map[string]plugin{}, Client: l.dev || l.client, Dev: l.dev}
	for _, path := range l.configs {
		if !filepath.IsAbs(path) {
			path = filepath.Join("/", l.workDir, path)
		}
		files, err := configFiles(f, path)
		if err != nil {
			return c, err
		}
		for _, file := range files {
			text, err := os.ReadFile(host(f, file))
			if err != nil {
				return c, err
			}
			keys, err := clientconfig.Decode(file, text)
			if err != nil {
				return c, err
			}
			c.merge(keys)
			c.Files = append(c.Files, file)
		}
	}
	c.DataDir, c.PluginDir = cmp.Or(l.dataDir, c.DataDir), cmp.Or(l.pluginDir, c.PluginDir)
	return c, nil
}

// configFiles are the files of a -config.
func configFiles(f *doctor.Facts, path string) (files []string, err error) {
	info, err := os.Stat(host(f, path))
	if err != nil || !info.IsDir() {
		return []string{path}, err
	}
	entries, err := os.ReadDir(host(f, path)) // sorted
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); (ext == ".hcl" || ext == ".json") && !e.IsDir() {
			files = append(files, filepath.Join(path, e.Name()))
		}
	}
	return files, err
}

// merge adds the keys of a file. Later values replace earlier ones; of plugin blocks with one label the later keys do.
func (c *agentConfig) merge(keys map[string]any) {
	set := func(field *string, value any) {
		if s, ok := value.(string); ok {
			*field = s
		}
	}
	set(&c.DataDir, keys["data_dir"])
	set(&c.PluginDir, keys["plugin_dir"])
	for _, client := range blocks(keys["client"]) {
		if on, ok := client["enabled"]; ok {
			c.Client = fmt.Sprint(on) == "true"
		}
	}
	for _, byLabel := range blocks(keys["plugin"]) {
		for label, bodies := range byLabel {
			p := c.Plugins[label]
			for _, body := range blocks(bodies) {
				p.merge(body)
			}
			c.Plugins[label] = p
		}
	}
}

func (p *plugin) merge(body map[string]any) {
	for key, value := range body {
		switch key {
		case "config":
			p.Config = map[string]any{}
			for _, config := range blocks(value) {
				maps.Copy(p.Config, config)
			}
		case "args":
		default:
			p.Unknown = append(p.Unknown, key)
		}
	}
	slices.Sort(p.Unknown)
}

// blocks are the values of a block: HCL decodes each block as a list of mappings, of JSON a single mapping may be one.
func blocks(value any) []map[string]any {
	switch v := value.(type) {
	case []map[string]any:
		return v
	case map[string]any:
		return []map[string]any{v}
	case []any:
		var all []map[string]any
		for _, each := range v {
			all = append(all, blocks(each)...)
		}
		return all
	}
	return nil
}

// flat is a config block with mappings as mappings, as Nomad passes it to a plugin.
func flat(block map[string]any) map[string]any {
	keys := map[string]any{}
	for key, value := range block {
		if nested := blocks(value); nested != nil {
			merged := map[string]any{}
			for _, n := range nested {
				maps.Copy(merged, n)
			}
			value = merged
		}
		keys[key] = value
	}
	return keys
}
