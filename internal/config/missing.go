package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// paths are the values of options with Spec.Exists that are given.
type paths []Value

func (p *paths) add(o Spec, v Value) {
	if o.Exists && v.Where != "" && filepath.IsAbs(v.Text) {
		*p = append(*p, v)
	}
}

// missing has a line for each path that is not on this node. It is no problem of a configuration that is checked elsewhere.
func (p paths) missing() (lines []string) {
	for _, v := range p {
		if _, err := os.Stat(v.Text); errors.Is(err, fs.ErrNotExist) {
			lines = append(lines, v.Where+": "+v.Text+" is not on this node")
		}
	}
	return lines
}

// Missing has a line for each path that flags, environment and the file of the settings give and that does not exist on this node. A
// driver root that this process has at another place is not looked for.
func (s Kubernetes) Missing(flags Flags, env Environment) []string {
	var given paths
	for _, o := range kubernetesOptions(new(Kubernetes), nil) {
		if v := lookup(o, flags, env, s.File.values); v.Text != s.DriverRoot || s.Core.Roots.Driver == s.DriverRoot {
			given.add(o, v)
		}
	}
	return given.missing()
}

// Missing has a line for each path in the block that does not exist on this node.
func (b Block) Missing() []string { return b.paths.missing() }
