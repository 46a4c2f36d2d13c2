package nomadadapter

import (
	"errors"
	"path/filepath"
	"strings"
	"time"

	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/core"
)

// minPeriod is the shortest time between full readings of the machine that an operator may ask for.
// Events and health checks do not wait for a full reading.
const minPeriod = time.Second

// settings is the plugin's config block. Nomad encodes it with go-msgpack and honours codec tags only.
// The first three keys are those of nomad-device-nvidia.
type settings struct {
	Enabled           bool     `codec:"enabled"`
	IgnoredGPUIDs     []string `codec:"ignored_gpu_ids"`
	FingerprintPeriod string   `codec:"fingerprint_period"`
	DriverRoot        string   `codec:"driver_root"`
	DevRoot           string   `codec:"dev_root"`
	SysfsRoot         string   `codec:"sysfs_root"`
	ProcfsRoot        string   `codec:"procfs_root"`
}

// schema is what Nomad checks a config block against before we see it. Every key is optional.
var schema = hclspec.NewObject(map[string]*hclspec.Spec{
	"enabled":            optional("enabled", "bool", `true`),
	"ignored_gpu_ids":    optional("ignored_gpu_ids", "list(string)", `[]`),
	"fingerprint_period": optional("fingerprint_period", "string", `"1m"`),
	"driver_root":        optional("driver_root", "string", `"/"`),
	"dev_root":           optional("dev_root", "string", `""`), // as driver_root
	"sysfs_root":         optional("sysfs_root", "string", `"/sys"`),
	"procfs_root":        optional("procfs_root", "string", `"/proc"`),
})

func optional(key, kind, value string) *hclspec.Spec {
	return hclspec.NewDefault(hclspec.NewAttr(key, kind, false), hclspec.NewLiteral(value))
}

func defaultSettings() settings {
	return settings{
		Enabled: true, FingerprintPeriod: "1m",
		DriverRoot: "/", SysfsRoot: "/sys", ProcfsRoot: "/proc",
	}
}

// decode reads a config block in Nomad's encoding. No bytes at all mean that there is no block.
func decode(msgpack []byte) (settings, error) {
	s := defaultSettings()
	if len(msgpack) == 0 {
		return s, nil
	}
	return s, base.MsgPackDecode(msgpack, &s)
}

// core returns the settings in the core's words, or every problem at once (errors.Join of
// *core.ConfigError).
//
// MIG is always mixed, as in nomad-device-nvidia: a GPU in MIG mode is hidden behind its instances.
func (s settings) core() (core.Config, error) {
	c := core.DefaultConfig()
	c.MIG = core.MIGMixed
	c.DeviceNodes = true

	var errs []error
	refuse := func(key, value, remedy string) {
		errs = append(errs, &core.ConfigError{Key: key, Value: value, Remedy: remedy})
	}
	for _, id := range s.IgnoredGPUIDs {
		if !strings.HasPrefix(id, "GPU-") && !strings.HasPrefix(id, "MIG-") {
			refuse("ignored_gpu_ids", id, "want UUIDs as nvidia-smi -L prints them: GPU-... or MIG-...")
		}
		c.Exclude = append(c.Exclude, core.DeviceID(id))
	}
	period, err := time.ParseDuration(s.FingerprintPeriod)
	switch {
	case err != nil:
		refuse("fingerprint_period", s.FingerprintPeriod, `want a duration such as "30s" or "1m"`)
	case period < minPeriod:
		refuse("fingerprint_period", s.FingerprintPeriod, "want "+minPeriod.String()+" or more")
	}
	c.Rescan = period

	if s.DevRoot == "" {
		s.DevRoot = s.DriverRoot
	}
	for _, root := range []struct {
		key, value, host string
		to               *string
	}{
		{"driver_root", s.DriverRoot, "/", &c.Roots.Driver},
		{"dev_root", s.DevRoot, "/", &c.Roots.Dev},
		{"sysfs_root", s.SysfsRoot, "/sys", &c.Roots.Sys},
		{"procfs_root", s.ProcfsRoot, "/proc", &c.Roots.Proc},
	} {
		if !filepath.IsAbs(root.value) {
			refuse(root.key, root.value, "want an absolute path such as "+root.host)
		}
		if clean := filepath.Clean(root.value); clean != root.host {
			*root.to = clean
		}
	}
	return c, errors.Join(errs...)
}
