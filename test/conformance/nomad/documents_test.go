package nomad

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/hashicorp/hcl"
	"github.com/hashicorp/nomad/acl"
	"github.com/hashicorp/nomad/jobspec2"
)

// examples are blocks of HCL in Markdown, and those within a sentence.
var examples = regexp.MustCompile("(?ms)^```hcl\n(.*?)^```|`([a-z_]+ (?:\"[^`\"]*\" )?\\{ [^`]*\\})`")

// firstWord is the kind of block that a text in HCL begins with, and its label.
var firstWord = regexp.MustCompile(`^\s*([a-z_]+)(?: +"([^"]*)")?`)

// Every block of HCL in the documents is a configuration that Nomad's plugin loader accepts for the plugin, or a job, or a part of one that
// Nomad's parser accepts.
func TestDocuments(t *testing.T) {
	var paths []string
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "deploy/*/*.md"} {
		found, err := filepath.Glob(filepath.Join("../../..", pattern))
		must(t, err)
		paths = append(paths, found...)
	}
	kinds := map[string]int{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		must(t, err)
		for _, found := range examples.FindAllStringSubmatch(string(text), -1) {
			b := found[1] + found[2]
			m := firstWord.FindStringSubmatch(b)
			if m == nil {
				t.Errorf("%s: no block of HCL:\n%s", path, b)
				continue
			}
			kinds[m[1]]++
			if err := accept(t, m[1], b); err != nil {
				t.Errorf("%s: %v\n%s", path, err, b)
			}
		}
	}
	if kinds["plugin"] < 3 || kinds["job"] < 1 || kinds["resources"] < 2 {
		t.Errorf("blocks by kind: %v", kinds)
	}
}

// accept parses a text as Nomad does.
func accept(t *testing.T, kind, text string) error {
	t.Helper()
	const task = "job \"j\" {\n group \"g\" {\n task \"t\" {\n driver = \"docker\"\n%s\n}\n}\n}\n"
	switch kind {
	case "plugin":
		return acceptPlugins(t, text)
	case "job":
	case "namespace":
		_, err := acl.Parse(text, acl.PolicyParseStrict)
		return err
	case "task", "constraint":
		text = fmt.Sprintf("job \"j\" {\n group \"g\" {\n%s\n}\n}\n", text)
	case "resources", "config", "restart":
		text = fmt.Sprintf(task, text)
	default:
		return fmt.Errorf("no test knows a block %q", kind)
	}
	_, err := jobspec2.Parse("job.hcl", strings.NewReader(text))
	return err
}

// acceptPlugins reads plugin blocks as a client reads its configuration (HCL 1), and loads the plugin with those of its own. Paths that
// are not there are no error of the loader.
func acceptPlugins(t *testing.T, text string) error {
	t.Helper()
	var file struct {
		Plugin []map[string][]struct {
			Config []map[string]any
		}
	}
	if err := hcl.Decode(&file, text); err != nil {
		return err
	}
	for _, p := range file.Plugin {
		for name, blocks := range p {
			if !slices.Contains([]string{"nomad-gpu", "nomad-device-nvidia"}, name) || len(blocks[0].Config) == 0 {
				continue
			}
			keys := blocks[0].Config[0]
			delete(keys, "policy_file") // it is read when the plugin starts, and is not on this machine
			if a := newAgent(t, keys); a.load != nil {
				return a.load
			}
		}
	}
	return nil
}
