package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// subject is an orchestrator whose own code runs the agent in a conformance test.
type subject struct {
	name   string
	folder string // of the conformance test
	module string
	newest int // the minor version whose API the tests call; for older ones they have files with tags "before1.N"
	patch  int // of it
	// local returns the published version of a module that the orchestrator replaces by a folder of its repository.
	local    func(module, version string) string
	versions []string
	packages []string // with tests, below the folder, beside that of the folder
}

// staging is the published version of a staging module: k8s.io/kubernetes v1.X.Y has these in folders, and each is also published as v0.X.Y.
func staging(_, version string) string { return "v0." + strings.TrimPrefix(version, "v1.") }

var kubernetes = []string{"v1.34.4", "v1.35.4", "v1.36.3", "v1.37.1", "v1.37.2"}

var kubelet = &subject{
	name:     "kubelet",
	folder:   "test/conformance/kubelet",
	module:   "k8s.io/kubernetes",
	newest:   37,
	patch:    1,
	local:    staging,
	versions: kubernetes,
}

// dra is the kubelet's DRA manager, and the API server's own code for slices. The tests of the scheduler's allocator call that of the newest
// version only.
var dra = &subject{
	name:     "dra",
	folder:   "test/conformance/dra",
	module:   "k8s.io/kubernetes",
	newest:   37,
	patch:    1,
	local:    staging,
	versions: kubernetes,
	packages: []string{"wire"},
}

var nomad = &subject{
	name:   "nomad",
	folder: "test/conformance/nomad",
	module: "github.com/hashicorp/nomad",
	newest: 11,
	patch:  3,
	// Nomad's API is a module without versions: the commit of v1.10.5, and what the conformance test has for v1.11.
	local: func(_, version string) string {
		if strings.HasPrefix(version, "v1.10.") {
			return "v0.0.0-20250909143645-a3b86c697f38"
		}
		return "v0.0.0-20260907080526-08ef8f3d26da"
	},
	versions: []string{"v1.10.0", "v1.10.5", "v1.11.0", "v1.11.3"},
}

var subjects = map[string]*subject{kubelet.name: kubelet, dra.name: dra, nomad.name: nomad}

type version struct {
	*subject
	number string
}

func (v version) String() string { return v.name + "@" + v.number }

// versions returns those that are run by default.
func versions() (all []version) {
	for _, s := range []*subject{kubelet, dra, nomad} {
		for _, number := range s.versions {
			all = append(all, version{s, number})
		}
	}
	return all
}

// tags are the build tags for each minor version between this one and the newest, and that for patches before the newest's.
func (v version) tags() (string, error) {
	var minor, patch int
	if _, err := fmt.Sscanf(v.number, "v1.%d.%d", &minor, &patch); err != nil {
		return "", fmt.Errorf("%s: want v1.N.N: %w", v, err)
	}
	var tags []string
	for n := minor + 1; n <= v.newest; n++ {
		tags = append(tags, fmt.Sprintf("before1.%d", n))
	}
	if minor < v.newest || patch < v.patch {
		tags = append(tags, fmt.Sprintf("before1.%d.%d", v.newest, v.patch))
	}
	return strings.Join(tags, ","), nil
}

var errNoModule = errors.New("the module proxy does not have this version")

// writeModule writes a go.mod for the conformance test with this version and the versions of dependencies that it names itself,
// and returns its path. The conformance test's own stays as it is: the toolchain takes another by -modfile.
func (v version) writeModule(ctx context.Context, dir string) (string, error) {
	out, err := command(ctx, dir, "mod", "download", "-json", v.module+"@"+v.number)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errNoModule, err)
	}
	var downloaded struct{ GoMod string }
	if err := json.Unmarshal(out, &downloaded); err != nil {
		return "", err
	}
	if out, err = command(ctx, dir, "mod", "edit", "-json", downloaded.GoMod); err != nil {
		return "", err
	}
	type module struct{ Path, Version string }
	var own struct{ Replace []struct{ Old, New module } }
	if err := json.Unmarshal(out, &own); err != nil {
		return "", err
	}
	text := &strings.Builder{}
	_, _ = fmt.Fprintf(text, "module github.com/tandem-gpu/tandem/%s\n\ngo 1.26.0\n\nrequire %s %s\n", v.folder, v.module, v.number)
	for _, r := range own.Replace {
		path, number := r.New.Path, r.New.Version
		if number == "" { // a folder
			path, number = r.Old.Path, v.local(r.Old.Path, v.number)
		}
		_, _ = fmt.Fprintf(text, "replace %s => %s %s\n", r.Old.Path, path, number)
	}
	_, _ = fmt.Fprintln(text, "replace github.com/tandem-gpu/tandem => ../../..") // relative to the folder of the test
	file := filepath.Join(dir, "go.mod")
	return file, os.WriteFile(file, []byte(text.String()), 0o644)
}
