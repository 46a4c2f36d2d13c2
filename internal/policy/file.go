package policy

import (
	"errors"
	"path/filepath"

	"github.com/tandem-gpu/tandem/internal/configfile"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
)

const (
	migStrategy = "flags.migStrategy"
	mpsRoot     = "flags.mpsRoot"
)

// Keys are all keys of a file, for an agent that needs no more of it than ReadFile says.
func Keys() map[string]configfile.Kind {
	keys := map[string]configfile.Kind{migStrategy: configfile.Scalar, mpsRoot: configfile.Scalar}
	for _, key := range Sections() {
		keys[key] = configfile.Section
	}
	for _, key := range []string{
		"flags.failOnInitError", "flags.nvidiaDriverRoot", "flags.nvidiaDevRoot", "flags.gdrcopyEnabled", "flags.gdsEnabled",
		"flags.mofedEnabled", "flags.useNodeFeatureAPI", "flags.deviceDiscoveryStrategy", "flags.gfd",
		"flags.plugin.passDeviceSpecs", "flags.plugin.deviceListStrategy", "flags.plugin.deviceIDStrategy",
		"flags.plugin.cdiAnnotationPrefix", "flags.plugin.nvidiaCTKPath", "flags.plugin.containerDriverRoot",
		"flags.plugin.sharedDevicesAllocationPolicy", "imex.channelIDs", "imex.required",
	} {
		keys[key] = configfile.Opaque
	}
	for _, k := range healthconfig.Keys() {
		keys["health."+k.YAML()] = configfile.Opaque
	}
	return keys
}

// ReadFile reads the file at path for an agent of the orchestrator. Keys that do not concern devices are known
// and skipped. Every problem is returned at once: errors.Join of *core.ConfigError, each with line and path of
// the key, or of the error with which the file can't be read.
func ReadFile(path string, to Orchestrator) (Result, error) {
	f, errs := configfile.Read(path, Keys())
	return read(f, errs, to)
}

// Parse is ReadFile of a file at path whose text has been read already.
func Parse(path string, text []byte, to Orchestrator) (Result, error) {
	f, errs := configfile.Parse(path, text, Keys())
	return read(f, errs, to)
}

func read(f configfile.File, errs []error, to Orchestrator) (Result, error) {
	r, err := Compile(f, to)
	errs = append(errs, err)
	refuse := func(v configfile.Value, remedy string) {
		errs = append(errs, &core.ConfigError{Key: v.Where, Value: v.Text, Remedy: remedy})
	}
	if v := f.Values[migStrategy]; v.Text != "" {
		r.MIG = core.MIGStrategy(v.Text)
		switch r.MIG {
		case core.MIGNone, core.MIGSingle, core.MIGMixed:
		default:
			refuse(v, "want none, single or mixed")
		}
	}
	if v := f.Values[mpsRoot]; v.Text != "" {
		r.MPSRoot = v.Text
		if !filepath.IsAbs(v.Text) {
			refuse(v, "want an absolute path such as /run/nvidia/mps")
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Result{}, err
	}
	r.Text = string(f.Text)
	return r, nil
}
