// Package config reads the configuration file of gpu-fleet.
package config

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// Defaults.
const (
	DefaultPath   = "/etc/gpu-fleet/gpu-fleet.yaml"
	DefaultListen = "127.0.0.1:9410"

	defaultFile = "/var/lib/gpu-fleet/ledger.json"
	defaultName = "gpu-fleet" // of the ConfigMap and its namespace
	defaultVars = "nomad/jobs/gpu-fleet"
)

// Config is the configuration of gpu-fleet. Its paths are absolute, or relative to the working directory if that of the file is.
type Config struct {
	Clusters []ClusterConfig
	Policy   rescue.Policy
	Ledger   Ledger

	Listen    string // address of the HTTP server
	TokenFile string // has what a request to stop or resume must present; "" = no such request is accepted

	files []file
}

// ClusterConfig is one Kubernetes cluster or Nomad region.
type ClusterConfig struct {
	Name string
	Kind fleet.Kind
	Mode rescue.Mode

	// Of Kubernetes.

	Kubeconfig, Context string   // "" = the cluster in which this program runs; the context of the file
	Controllers         []string // further kinds of owners that replace their pods: "PyTorchJob.kubeflow.org"

	// Of Nomad.

	Address, Region, TokenFile string
	CAFile, CertFile, KeyFile  string
}

// Ledger is where the ledger is, and who elects the leader.
type Ledger struct {
	Cluster         string // name of the cluster that has it; "" = File has it
	Namespace, Name string // of the ConfigMap and the Lease, or the path of the variables
	File            string
}

// file is one that the configuration names.
type file struct {
	where, path string
	later       bool // it is read at each use
}

// Load reads the file at path. It returns every problem (errors.Join of *setting.Error with line and path of the key), and what could be read.
func Load(path string) (Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return Config{Policy: rescue.Default(), Listen: DefaultListen}, fmt.Errorf("configuration file: %w: want one that can be read, by --config-file or GPU_FLEET_CONFIG_FILE", err)
	}
	return Parse(path, text)
}

// Parse is Load of a text.
func Parse(path string, text []byte) (Config, error) {
	d := document.Parse(path, text)
	r := reader{folder: filepath.Dir(path)}
	switch {
	case d.Problems() > 0:
		return Config{Policy: rescue.Default(), Listen: DefaultListen}, d.Err()
	case !d.Root().Given():
		d.AddProblem(0, &setting.Error{Key: path + ": clusters", Remedy: wantClusters})
	}
	r.read(d.Root())
	return r.config, d.Err()
}

// Unread has a problem for each file of the configuration that this process can't read now: of those that are read at the start, and of those that are
// read at each use. It is none of a configuration that is checked elsewhere.
func (c Config) Unread() (start, later []error) {
	for _, f := range c.files {
		opened, err := os.Open(f.path)
		if err == nil {
			_ = opened.Close() // nothing was written
			continue
		}
		err = &setting.Error{Key: f.where, Value: f.path, Remedy: fmt.Sprintf("want a file that can be read: %v", err)}
		if f.later {
			later = append(later, err)
		} else {
			start = append(start, err)
		}
	}
	return start, later
}

// LedgerCluster is the cluster that has the ledger; false if a file has it.
func (c Config) LedgerCluster() (ClusterConfig, bool) {
	i := slices.IndexFunc(c.Clusters, func(one ClusterConfig) bool { return one.Name == c.Ledger.Cluster })
	if i < 0 {
		return ClusterConfig{}, false
	}
	return c.Clusters[i], true
}

// Summary is what the configuration means, in lines.
func (c Config) Summary() (lines []string) {
	for _, one := range c.Clusters {
		lines = append(lines, one.String())
	}
	p := c.Policy
	lines = append(lines, c.Ledger.String(),
		fmt.Sprintf("a fault counts after %v; budget: GPUs of a node an hour: %d; nodes at a time: %d, or %d%% if that is more; attempts a GPU a day: %d",
			shortest(p.Delay), p.MaxGPUs, p.MaxNodes, p.MaxPercent, p.Attempts),
		fmt.Sprintf("faults of one cause within %v stop all acts if the nodes are more than: %d", shortest(p.QuorumTime), p.QuorumNodes))
	if len(p.Ignore) > 0 {
		lines = append(lines, "ignored causes: "+strings.Join(p.Ignore, ", "))
	}
	if p.Preempt {
		lines = append(lines, "one workload of lower priority may be ended for a replacement")
	}
	if p.Ineligible {
		lines = append(lines, "a Nomad node of which all GPUs need repair is made ineligible")
	}
	if c.TokenFile == "" {
		return append(lines, "HTTP server at "+c.Listen+"; stop and resume are refused: token_file is not set")
	}
	return append(lines, "HTTP server at "+c.Listen+"; stop and resume need the token in "+c.TokenFile)
}

// String is the cluster in one line.
func (c ClusterConfig) String() string {
	text := fmt.Sprintf("cluster %s: %s, mode %s", c.Name, c.Kind, c.Mode)
	switch {
	case c.Kind == fleet.Nomad:
		text += ", " + c.Address
		if c.Region != "" {
			text += ", region " + c.Region
		}
	case c.Kubeconfig == "":
		text += ", the one in which gpu-fleet runs"
	default:
		text += ", " + c.Kubeconfig
		if c.Context != "" {
			text += ", context " + c.Context
		}
	}
	if len(c.Controllers) > 0 {
		text += ", also moves pods of " + strings.Join(c.Controllers, ", ")
	}
	return text
}

// String is the place of the ledger in one line.
func (l Ledger) String() string {
	if l.Cluster == "" {
		return "ledger: file " + l.File + ", for one process"
	}
	return fmt.Sprintf("ledger: %s in namespace %s of cluster %s", cmp.Or(l.Name, defaultName), cmp.Or(l.Namespace, "default"), l.Cluster)
}
