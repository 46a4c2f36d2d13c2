package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"unicode"
)

// module is a module of which a binary links packages.
type module struct {
	Path, Version string
	Files         []string // license, notice and patent files that apply to the linked packages
	Expression    string   // SPDX
}

// standard is the name of Go's standard library and runtime, as SBOMs have it.
const standard = "stdlib"

// source returns the address of the module's source code.
func (m module) source() string {
	if m.Path == standard {
		return "https://go.dev/dl/" + m.Version + ".src.tar.gz"
	}
	return "https://proxy.golang.org/" + escaped(m.Path) + "/@v/" + escaped(m.Version) + ".zip"
}

// escaped spells a module path or version as the module proxy's protocol does: an upper case letter is "!" and the lower case one.
func escaped(s string) string {
	var b strings.Builder
	for _, r := range s {
		if unicode.IsUpper(r) {
			b.WriteByte('!')
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// listed is what "go list -json" prints of a package.
type listed struct {
	Dir      string
	Standard bool
	Module   *struct {
		Path, Version, Dir string
		Main               bool
	}
}

// modulesOf lists the modules that a binary links, with Go's standard library. The build that the binary records decides which packages
// of them count: a module may have parts under other licenses.
func modulesOf(ctx context.Context, binary string) ([]module, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	packages, err := linkedPackages(ctx, info)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", binary, err)
	}
	files := map[[2]string]map[string]bool{}
	for _, p := range packages {
		if p.Standard || p.Module == nil || p.Module.Main {
			continue
		}
		key := [2]string{p.Module.Path, p.Module.Version}
		if files[key] == nil {
			files[key] = map[string]bool{}
		}
		found, err := licenseFiles(p.Dir, p.Module.Dir)
		if err != nil {
			return nil, err
		}
		for _, file := range found {
			files[key][file] = true
		}
	}
	if err := sameModules(info.Deps, files); err != nil {
		return nil, fmt.Errorf("%s: %w", binary, err)
	}
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOROOT: %w", err)
	}
	root := strings.TrimSpace(string(goroot))
	modules := []module{{Path: standard, Version: info.GoVersion, Files: []string{filepath.Join(root, "LICENSE"), filepath.Join(root, "PATENTS")}}}
	for key, set := range files {
		modules = append(modules, module{Path: key[0], Version: key[1], Files: slices.Sorted(maps.Keys(set))})
	}
	slices.SortFunc(modules, func(a, b module) int { return strings.Compare(a.Path, b.Path) })
	for i, m := range modules {
		if modules[i].Expression, err = expression(m.Files); err != nil {
			return nil, fmt.Errorf("%s: %w", m.Path, err)
		}
		if m.Path != nomad && strings.Contains(modules[i].Expression, businessSource) {
			return nil, fmt.Errorf("%s: license %s: only %s may have it", m.Path, businessSource, nomad)
		}
	}
	return modules, nil
}

// linkedPackages lists the packages of a binary, by the settings with which it was built.
func linkedPackages(ctx context.Context, info *debug.BuildInfo) ([]listed, error) {
	args := []string{"list", "-deps", "-json=Dir,Standard,Module"}
	env := os.Environ()
	for _, s := range info.Settings {
		switch s.Key {
		case "-tags":
			args = append(args, "-tags="+s.Value)
		case "GOOS", "GOARCH", "CGO_ENABLED":
			env = append(env, s.Key+"="+s.Value)
		}
	}
	list := exec.CommandContext(ctx, "go", append(args, info.Path)...)
	var stderr bytes.Buffer
	list.Env, list.Stderr = env, &stderr
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w: %s", err, stderr.Bytes())
	}
	var packages []listed
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		packages = append(packages, p)
	}
}

// sameModules compares the modules that a binary records with those of the working tree's packages.
func sameModules(deps []*debug.Module, files map[[2]string]map[string]bool) error {
	recorded := map[[2]string]bool{}
	for _, m := range deps {
		recorded[[2]string{m.Path, m.Version}] = true
	}
	var errs []error
	for key := range recorded {
		if files[key] == nil {
			errs = append(errs, fmt.Errorf("links %s %s, which the working tree does not have", key[0], key[1]))
		}
	}
	for key := range files {
		if !recorded[key] {
			errs = append(errs, fmt.Errorf("the working tree has %s %s, which it does not link", key[0], key[1]))
		}
	}
	return errors.Join(errs...)
}
