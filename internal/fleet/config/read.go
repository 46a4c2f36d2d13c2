package config

import (
	"cmp"
	"errors"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// reader makes a Config of a document. The problems are in the document.
type reader struct {
	folder string // of the file
	config Config
}

func (r *reader) read(root document.Value) {
	f := root.Fields(schema.Names(rootKeys())...)
	r.clusters(f.At("clusters"))
	r.ledger(f.At("ledger"))
	r.config.Policy = policy(f.At("policy"))
	r.config.Listen = cmp.Or(matching(f.At("listen"), listenType, false), DefaultListen)
	r.config.TokenFile = r.path(f.At("token_file"), atEachUse)
}

// wantClusters is the remedy for a file without clusters.
const wantClusters = "want a list of Kubernetes clusters and Nomad regions, one at least"

func (r *reader) clusters(list document.Value) {
	items := list.Items()
	if len(items) == 0 && list.Line() > 0 && (!list.Given() || list.IsList()) {
		list.Failf(wantClusters)
	}
	names, targets := map[string]document.Value{}, map[string]string{}
	for _, item := range items {
		f := item.Fields(schema.Names(clusterKeys)...)
		if !item.IsMapping() {
			continue
		}
		c := r.cluster(f)
		if before, ok := names[c.Name]; ok && c.Name != "" {
			f.At("name").Failf("want another name: %s has it", before.Path())
		}
		if before, ok := targets[c.target()]; ok && c.target() != "" {
			item.Failf("want another cluster: %s has the same one, and its nodes would count twice", before)
		}
		names[c.Name], targets[c.target()] = item, item.Path()
		r.config.Clusters = append(r.config.Clusters, c)
	}
}

// target is what the servers of a cluster are reached by; "" = not known.
func (c ClusterConfig) target() string {
	switch {
	case c.Kind == fleet.Kubernetes:
		return "kubeconfig " + c.Kubeconfig + " " + c.Context
	case c.Address != "":
		return strings.TrimSuffix(c.Address, "/") + " " + c.Region
	}
	return ""
}

func (r *reader) cluster(f document.Fields) ClusterConfig {
	c := ClusterConfig{Mode: rescue.ModeReport}
	c.Name = matching(f.At("name"), nameType, true)
	if kind, ok := f.At("kind").OneOf(kinds...); ok {
		c.Kind = fleet.Kind(kind)
	}
	if v := f.At("mode"); v.Given() {
		if mode, ok := v.OneOf(modes...); ok {
			c.Mode = rescue.Mode(slices.Index(modes, mode)) //nolint:gosec // one of three
		}
	}
	switch c.Kind {
	case fleet.Kubernetes:
		refuse(f.Given(nomadKeys...), fleet.Nomad)
		r.kubernetes(f, &c)
	case fleet.Nomad:
		refuse(f.Given(kubernetesKeys...), fleet.Kubernetes)
		r.nomad(f, &c)
	}
	return c
}

// refuse adds a problem for each key that is of another kind of cluster.
func refuse(given []document.Value, of fleet.Kind) {
	for _, v := range given {
		v.Failf("only a cluster of kind %s has this key: leave it out", of)
	}
}

func (r *reader) kubernetes(f document.Fields, c *ClusterConfig) {
	c.Kubeconfig, c.Context = r.path(f.At("kubeconfig"), atStart), text(f.At("context"))
	if c.Context != "" && c.Kubeconfig == "" {
		f.At("context").Failf("want a kubeconfig beside it, or no context")
	}
	for _, item := range f.At("controllers").Items() {
		if name := matching(item, controllerType, true); name != "" {
			c.Controllers = append(c.Controllers, name)
		}
	}
}

func (r *reader) nomad(f document.Fields, c *ClusterConfig) {
	c.Address, c.Region = matching(f.At("address"), addressType, true), text(f.At("region"))
	c.TokenFile, c.CAFile = r.path(f.At("token_file"), atEachUse), r.path(f.At("ca_file"), atStart)
	c.CertFile, c.KeyFile = r.path(f.At("cert_file"), atStart), r.path(f.At("key_file"), atStart)
	if (c.CertFile == "") != (c.KeyFile == "") {
		given, other := "cert_file", "key_file"
		if c.CertFile == "" {
			given, other = other, given
		}
		f.At(given).Failf("want %s beside it", other)
	}
	if c.Address != "" && !strings.HasPrefix(c.Address, "https://") {
		for _, v := range f.Given("ca_file", "cert_file", "key_file") {
			if v.Text() != "" {
				v.Failf("has no effect without https: want an address that begins with https://, or no such file")
			}
		}
	}
}

// The forms of names and namespaces of the ledger, by kind of cluster.
var (
	objectName    = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
	objectSpace   = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	variablePath  = regexp.MustCompile(`^[A-Za-z0-9~_-]([A-Za-z0-9~_/-]{0,118}[A-Za-z0-9~_-])?$`) // with /ledger, at most 128
	variableSpace = regexp.MustCompile(`^[A-Za-z0-9-]{1,128}$`)
)

func (r *reader) ledger(v document.Value) {
	f, l := v.Fields(schema.Names(ledgerKeys)...), &r.config.Ledger
	l.Cluster, l.Namespace, l.Name = text(f.At("cluster")), text(f.At("namespace")), text(f.At("name"))
	if l.Cluster == "" {
		for _, v := range f.Given("namespace", "name") {
			v.Failf("want a cluster beside it, or leave it out: without one the ledger is a file")
		}
		l.File = r.resolve(cmp.Or(text(f.At("file")), defaultFile))
		return
	}
	for _, v := range f.Given("file") {
		v.Failf("want cluster or file, not both")
	}
	c, ok := r.config.LedgerCluster()
	if !ok {
		f.At("cluster").Failf("want the name of one of the clusters%s", r.likely(l.Cluster))
		return
	}
	name, space := objectName, objectSpace
	if c.Kind == fleet.Nomad {
		name, space = variablePath, variableSpace
		l.Namespace, l.Name = cmp.Or(l.Namespace, "default"), cmp.Or(l.Name, defaultVars)
	}
	l.Namespace, l.Name = cmp.Or(l.Namespace, defaultName), cmp.Or(l.Name, defaultName)
	if !name.MatchString(l.Name) {
		f.At("name").Failf("want a valid name of a ConfigMap, or path of a Nomad variable")
	}
	if !space.MatchString(l.Namespace) {
		f.At("namespace").Failf("want a valid name of a namespace")
	}
}

// likely is the cluster that is meant by a name that none has.
func (r *reader) likely(written string) string {
	var names []string
	for _, c := range r.config.Clusters {
		if c.Name != "" {
			names = append(names, c.Name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	if name, ok := document.Near(written, names); ok {
		return ": did you mean " + name + "?"
	}
	return ": " + document.Choice(names)
}

// policy reads the section of that name.
func policy(v document.Value) rescue.Policy {
	p := rescue.Default()
	options := policyOptions(&p)
	var names []string
	for _, o := range options {
		names = append(names, o.Name)
	}
	f := v.Fields(names...)
	for _, o := range options {
		if v := f.At(o.Name); v.Given() {
			o.set(v)
		}
	}
	for _, err := range split(p.Check()) {
		if s, ok := errors.AsType[*setting.Error](err); ok {
			f.At(s.Key).Failf("want %s", s.Remedy)
		}
	}
	return p
}

// split are the errors that errors.Join has joined.
func split(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return joined.Unwrap()
	}
	return nil
}

// text is a scalar; "" if there is none.
func text(v document.Value) string {
	s, _ := v.Scalar()
	return s
}

// matching is a scalar that matches the pattern of a type; "" for another value.
func matching(v document.Value, t schema.Type, required bool) string {
	s, ok := v.Scalar()
	switch {
	case !ok, s == "" && !required:
		return ""
	case !regexp.MustCompile(t.Pattern).MatchString(s):
		v.Failf("want %s", strings.ReplaceAll(t.Words, "`", ""))
		return ""
	}
	return s
}

// When a file is read.
const (
	atStart   = false
	atEachUse = true
)

// path is the path of a file that has to be there; "" if none is given.
func (r *reader) path(v document.Value, later bool) string {
	s := text(v)
	if s == "" {
		return ""
	}
	path := r.resolve(s)
	r.config.files = append(r.config.files, file{v.Where(), path, later})
	return path
}

// resolve is a path that begins at the folder of the configuration file if it is relative.
func (r *reader) resolve(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(r.folder, path)
}
