package nomadadapter

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
	"github.com/tandem-gpu/tandem/internal/hostwatch"
	"github.com/tandem-gpu/tandem/internal/policy"
)

// Settings are what a config block and the policy file that it names say, in the words of those who follow the
// machine.
type Settings struct {
	Core    core.Config         // what Health says is in it
	Health  healthconfig.Values // the part that does not concern the core, too
	GroupBy GroupBy
	MPSRoot string // folder on the host that holds "nvidia.com/<pool>/pipe", the pipe directories of MPS daemons
}

// minPeriod is the shortest time between full readings of the machine that an operator may ask for.
// Events and health checks do not wait for a full reading.
const minPeriod = time.Second

// block is the plugin's config block. Nomad encodes it with go-msgpack and honours codec tags only.
// The first three keys are those of nomad-device-nvidia. What it says about health is a table's matter.
type block struct {
	Enabled           bool     `codec:"enabled"`
	IgnoredGPUIDs     []string `codec:"ignored_gpu_ids"`
	FingerprintPeriod string   `codec:"fingerprint_period"`
	DriverRoot        string   `codec:"driver_root"`
	DevRoot           string   `codec:"dev_root"`
	SysfsRoot         string   `codec:"sysfs_root"`
	ProcfsRoot        string   `codec:"procfs_root"`
	PolicyFile        string   `codec:"policy_file"`
	MIGStrategy       string   `codec:"mig_strategy"`
	GroupBy           string   `codec:"group_by"`
	MPSRoot           string   `codec:"mps_root"`

	health map[string]any // by key, as Nomad encodes it; absent and nil are the default
}

// schema is what Nomad checks a config block against before we see it. Every key is optional.
var schema = newSchema()

func newSchema() *hclspec.Spec {
	keys := map[string]*hclspec.Spec{
		"enabled":            optional("enabled", "bool", `true`),
		"ignored_gpu_ids":    optional("ignored_gpu_ids", "list(string)", `[]`),
		"fingerprint_period": optional("fingerprint_period", "string", `"1m"`),
		"driver_root":        optional("driver_root", "string", `"/"`),
		"dev_root":           optional("dev_root", "string", `""`), // as driver_root
		"sysfs_root":         optional("sysfs_root", "string", `"/sys"`),
		"procfs_root":        optional("procfs_root", "string", `"/proc"`),
		"policy_file":        optional("policy_file", "string", `""`),
		"mig_strategy":       optional("mig_strategy", "string", `""`), // as the policy file says, else mixed
		"group_by":           optional("group_by", "string", `"none"`),
		"mps_root":           optional("mps_root", "string", `""`), // as the policy file says, else the default
	}
	for _, k := range healthconfig.Keys() {
		keys[k.Name] = healthSpec(k)
	}
	return hclspec.NewObject(keys)
}

func optional(key, kind, value string) *hclspec.Spec {
	return hclspec.NewDefault(hclspec.NewAttr(key, kind, false), hclspec.NewLiteral(value))
}

func defaultBlock() block {
	return block{
		Enabled: true, FingerprintPeriod: "1m",
		DriverRoot: "/", SysfsRoot: "/sys", ProcfsRoot: "/proc",
		GroupBy: string(GroupByNone),
	}
}

// decode reads a config block in Nomad's encoding. No bytes at all mean that there is no block.
func decode(msgpack []byte) (block, error) {
	b := defaultBlock()
	if len(msgpack) == 0 {
		return b, nil
	}
	return b, errors.Join(base.MsgPackDecode(msgpack, &b), base.MsgPackDecode(msgpack, &b.health))
}

// settings returns what the block and its policy file say, and the file, which it reads. Whoever keeps the policy keeps the
// text in it: a second reading may find another. The error has every problem (errors.Join of
// *core.ConfigError, of policy.Parse's error, or of the error with which the file can't be read).
func (b block) settings() (s Settings, file policy.Result, err error) {
	var policyText []byte
	var unread []error
	switch {
	case b.PolicyFile == "":
	case !filepath.IsAbs(b.PolicyFile):
		unread = append(unread, &core.ConfigError{Key: "policy_file", Value: b.PolicyFile, Remedy: "want an absolute path such as /etc/tandem/policy.yaml"})
	default:
		if policyText, err = os.ReadFile(b.PolicyFile); err != nil {
			unread = append(unread, fmt.Errorf("configuration file: %w", err))
		}
	}
	if unread != nil {
		b.PolicyFile = "" // the other problems of the block
	}
	return b.compile(policyText, unread...)
}

// compile returns what the block says with a policy file of this text, or every problem, those that are known already
// included. It reads nothing.
func (b block) compile(policyText []byte, known ...error) (Settings, policy.Result, error) {
	s := Settings{Core: core.DefaultConfig()}
	s.Core.DeviceNodes = true
	problems := slices.Concat(known, b.setUp(&s.Core))
	file, unclear := b.offer(&s, policyText)
	problems = append(problems, unclear...)
	health, wrong := healthValues(b.health)
	health.Apply(&s.Core)
	s.Health = health
	return s, file, errors.Join(append(problems, wrong...)...)
}

// setUp says how the machine is read.
func (b block) setUp(c *core.Config) (problems []error) {
	refuse := func(key, value, remedy string) {
		problems = append(problems, &core.ConfigError{Key: key, Value: value, Remedy: remedy})
	}
	for _, id := range b.IgnoredGPUIDs {
		if !strings.HasPrefix(id, "GPU-") && !strings.HasPrefix(id, "MIG-") {
			refuse("ignored_gpu_ids", id, "want UUIDs as nvidia-smi -L prints them: GPU-... or MIG-...")
		}
		c.Exclude = append(c.Exclude, core.DeviceID(id))
	}
	period, err := time.ParseDuration(b.FingerprintPeriod)
	switch {
	case err != nil:
		refuse("fingerprint_period", b.FingerprintPeriod, `want a duration such as "30s" or "1m"`)
	case period < minPeriod:
		refuse("fingerprint_period", b.FingerprintPeriod, "want "+minPeriod.String()+" or more")
	}
	c.Rescan = period

	if b.DevRoot == "" {
		b.DevRoot = b.DriverRoot
	}
	for _, root := range []struct {
		key, value, host string
		to               *string
	}{
		{"driver_root", b.DriverRoot, "/", &c.Roots.Driver},
		{"dev_root", b.DevRoot, "/", &c.Roots.Dev},
		{"sysfs_root", b.SysfsRoot, "/sys", &c.Roots.Sys},
		{"procfs_root", b.ProcfsRoot, "/proc", &c.Roots.Proc},
	} {
		if !filepath.IsAbs(root.value) {
			refuse(root.key, root.value, "want an absolute path such as "+root.host)
		}
		if clean := filepath.Clean(root.value); clean != root.host {
			*root.to = clean
		}
	}
	return problems
}

// offer says what is offered, and how. Of what both the block and the file say, the block's word counts.
//
// MIG is mixed by default, as in nomad-device-nvidia: a GPU in MIG mode is hidden behind its instances.
func (b block) offer(s *Settings, policyText []byte) (file policy.Result, problems []error) {
	if b.PolicyFile != "" {
		var err error
		if file, err = policy.Parse(b.PolicyFile, policyText, policy.Nomad); err != nil {
			problems = append(problems, err)
		}
	}
	s.Core.Policy = file.Policy
	s.Core.MIG = cmp.Or(core.MIGStrategy(b.MIGStrategy), file.MIG, core.MIGMixed)
	if !slices.Contains([]core.MIGStrategy{core.MIGNone, core.MIGSingle, core.MIGMixed}, s.Core.MIG) {
		problems = append(problems, &core.ConfigError{Key: "mig_strategy", Value: b.MIGStrategy, Remedy: "want none, single or mixed"})
	}
	s.GroupBy = GroupBy(b.GroupBy)
	if !slices.Contains([]GroupBy{GroupByNone, GroupByNUMA, GroupByNVLink}, s.GroupBy) {
		problems = append(problems, &core.ConfigError{Key: "group_by", Value: b.GroupBy, Remedy: "want none, numa or nvlink"})
	}
	s.MPSRoot = filepath.Clean(cmp.Or(b.MPSRoot, file.MPSRoot, hostwatch.DefaultMPSRoot))
	if !filepath.IsAbs(s.MPSRoot) {
		problems = append(problems, &core.ConfigError{Key: "mps_root", Value: b.MPSRoot, Remedy: "want an absolute path such as " + hostwatch.DefaultMPSRoot})
	}
	return file, problems
}
