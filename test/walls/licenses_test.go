package walls

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/goldenfile"
)

// licenses are the texts by which a license file is recognised.
var licenses = []struct{ name, text string }{
	{"BUSL-1.1", "Business Source License 1.1"},
	{"MPL-2.0", "Mozilla Public License"},
	{"Apache-2.0", "Apache License"},
	{"ISC", "Permission to use, copy, modify, and/or distribute this software"},
	{"ISC", "Permission to use, copy, modify, and distribute this software"},
	{"MIT", "Permission is hereby granted, free of charge"},
	{"BSD-3-Clause", "Neither the name"},
	{"BSD-3-Clause", "contributors may be used to endorse"},
	{"BSD-2-Clause", "Redistributions in binary form"},
}

// licenseOf is the license of a package: that of the nearest license file, up to the root of its module.
func licenseOf(t *testing.T, dir, root string) string {
	t.Helper()
	for ; strings.HasPrefix(dir, root); dir = filepath.Dir(dir) {
		found, _ := filepath.Glob(filepath.Join(dir, "LICEN[CS]E*"))
		for _, path := range slices.Concat(found, []string{filepath.Join(dir, "COPYING")}) {
			text, err := os.ReadFile(path)
			if err != nil {
				continue
			}
			for _, l := range licenses {
				if strings.Contains(strings.Join(strings.Fields(string(text)), " "), l.text) {
					return l.name
				}
			}
		}
	}
	t.Errorf("%s: no license file that is known", dir)
	return "?"
}

// docs/licenses.md lists what the binaries link. `go test ./test/walls -update` writes it.
func TestLicenses(t *testing.T) {
	linked := map[string]map[string]bool{} // "license\x00module" to binaries
	for _, binary := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
		lines := list(t, "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}},{{$.Dir}},{{.Dir}}{{end}}{{end}}", module+"cmd/"+binary)
		for _, line := range lines {
			f := strings.Split(line, ",")
			key := licenseOf(t, f[1], f[2]) + "\x00" + f[0]
			if linked[key] == nil {
				linked[key] = map[string]bool{}
			}
			linked[key][binary] = true
		}
	}
	var doc strings.Builder
	doc.WriteString("<!-- Written by `go test ./test/walls -update`; do not edit. -->\n# Licenses\n\n" +
		"Tandem is licensed under [Apache-2.0](../LICENSE). Its binaries link packages of these modules (versions: go.mod). The packages of\n" +
		"github.com/hashicorp/nomad are the plugin API that a Nomad device plugin needs; only `nomad-gpu` links them. `gpu-fleet` links Nomad's API client\n" +
		"(github.com/hashicorp/nomad/api).\n\n" +
		"| license | module | linked by |\n|---|---|---|\n")
	for _, key := range slices.Sorted(maps.Keys(linked)) {
		license, path, _ := strings.Cut(key, "\x00")
		fmt.Fprintf(&doc, "| %s | %s | %s |\n", license, path, strings.Join(slices.Sorted(maps.Keys(linked[key])), ", "))
	}
	goldenfile.Compare(t, "../../docs/licenses.md", doc.String())
}
