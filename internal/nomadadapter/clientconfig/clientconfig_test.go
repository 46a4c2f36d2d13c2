package clientconfig

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/test/check"
)

const client = `# a client
data_dir = "/opt/nomad"
client { enabled = true }
plugin "docker" {
  config { allow_privileged = true }
}
plugin "nomad-gpu" {
  args = []
  config {
    enabled         = true
    recovery_checks = 4
    xids            = { "63" = "ignore" }
    ignored_gpu_ids = ["GPU-1"]
  }
}
`

func TestRead(t *testing.T) {
	for name, tc := range map[string]struct {
		text string
		want map[string]any
		err  string // without the folder
	}{
		"HCL":          {client, map[string]any{"enabled": true, "recovery_checks": int64(4), "xids": map[string]any{"63": "ignore"}, "ignored_gpu_ids": []any{"GPU-1"}}, ""},
		"a block xids": {`plugin "nomad-gpu" { config { xids { "63" = "ignore" } } }`, map[string]any{"xids": map[string]any{"63": "ignore"}}, ""},
		"JSON":         {`{"plugin": {"nomad-gpu": {"config": {"degraded": "unhealthy", "simulation": true, "xids": {"63": "ignore", "94": "degraded"}}}}}`, map[string]any{"degraded": "unhealthy", "simulation": true, "xids": map[string]any{"63": "ignore", "94": "degraded"}}, ""},
		"JSON lists":   {`{"plugin": [{"docker": {}}, {"nomad-gpu": [{"config": [{"degraded": "unhealthy"}]}]}]}`, map[string]any{"degraded": "unhealthy"}, ""},
		"no keys":      {`plugin "nomad-gpu" { config {} }`, map[string]any{}, ""},
		"no config":    {`plugin "nomad-gpu" {}`, map[string]any{}, ""},
		"syntax":       {"client {}\nplugin \"nomad-gpu\" {\n  config = = {}\n}\n", nil, `c.hcl:3: Unknown token: 3:12 ASSIGN =`},
		"a huge number": {`plugin "nomad-gpu" { config { recovery_checks = 99999999999999999999 } }`, nil,
			`c.hcl: 99999999999999999999: want a number of at most 64 bits, or a text in quotes`},
		"a panic of the library": {`{"\x0`, nil, `c.hcl: neither HCL nor JSON: bytes.Buffer: UnreadRune: previous operation was not a successful ReadRune`},
		"no plugin":              {"client {}\n", nil, `c.hcl: plugin = "": want plugin "nomad-gpu" { config { ... } }`},
		"another name":           {`plugin "nvidia-gpu" {}`, nil, `c.hcl: plugin = "": want plugin "nomad-gpu" { config { ... } }, the name of the plugin's file; the file has "nvidia-gpu"`},
		"two plugins":            {"plugin \"nomad-gpu\" {}\nplugin \"nomad-gpu\" {}\n", nil, `c.hcl:2: plugin = "nomad-gpu": given twice: want one block`},
		"two configs":            {"plugin \"nomad-gpu\" {\n  config {}\n  config {}\n}\n", nil, `c.hcl:3: config = "config": given twice: want one block`},
		"outside": {"plugin \"nomad-gpu\" {\n  degraded = \"no\"\n  xids { \"63\" = \"ignore\" }\n  config { simulation = true }\n}\n", map[string]any{"simulation": true},
			`c.hcl:2: degraded = "no": Nomad ignores keys of plugin "nomad-gpu" outside of config { }: move it there` + "\n" + `DIR/c.hcl:3: xids = "{ ... }": Nomad ignores keys of plugin "nomad-gpu" outside of config { }: move it there`},
		"a key twice": {"plugin \"nomad-gpu\" {\n  config {\n    degraded = \"x\"\n    degraded = \"y\"\n  }\n}\n", nil, `c.hcl: The argument "degraded" at 4:5 was already set. Each argument can only be defined once`},
		"no block":    {`plugin "nomad-gpu" { config = "x" }`, nil, `c.hcl:1: config = "x": want a block`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, "c.hcl")
			check.NoError(t, os.WriteFile(path, []byte(tc.text), 0o600))
			keys, err := Read(path, "nomad-gpu")
			text := ""
			if err != nil {
				text = strings.ReplaceAll(strings.TrimPrefix(err.Error(), dir+"/"), dir, "DIR")
			}
			if diff := cmp.Diff(tc.want, keys.Values); text != tc.err || (tc.err == "" || tc.want != nil) && diff != "" {
				t.Errorf("%s\n%s", text, diff)
			}
		})
	}
	if _, err := Read("/nowhere/c.hcl", "nomad-gpu"); err == nil || err.Error() != "configuration of the Nomad client: open /nowhere/c.hcl: no such file or directory" {
		t.Error(err)
	}
}

// Each problem of a block has the line of its key; a flag has precedence over the block.
func TestPlaces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.hcl")
	text := strings.Replace(client, "enabled         = true\n", "enabled = true\n    helth_mode = \"off\"\n    degraded = \"no\"\n    injection = []\n", 1)
	check.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	keys, err := Read(path, "nomad-gpu")
	check.NoError(t, err)
	flags := config.NewFlags(config.NomadSpecs())
	check.NoError(t, flags["driver-root"].Set("here"))
	_, _, err = config.BlockWithFlags(keys, flags).Read()
	want := `--driver-root = "here": want an absolute path such as /
` + path + `:13: injection = "": an empty list gives a task nothing: leave the key out
` + path + `:12: degraded = "no": want schedulable or unhealthy
` + path + `:11: helth_mode = "off": unknown key: did you mean health_mode?`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}
