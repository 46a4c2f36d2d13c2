package main

import (
	"errors"
	"maps"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/healthconfig"
)

// healthOptions are the settings of health, which both agents have.
func healthOptions() []option {
	var table []option
	for _, k := range healthconfig.Keys() {
		o := option{
			flag: k.Flag(), env: []string{k.Env()}, key: "health." + k.YAML(), value: k.Default, usage: k.Usage,
			set: func(s *settings, v string) error { return k.Set(&s.health, v) },
		}
		switch {
		case k.Name == healthconfig.XIDs:
			o.kind = mapping
		case k.Default == "false":
			o.kind = toggle
		default:
			o.blank = k.Set(&healthconfig.Values{}, "") == nil
		}
		table = append(table, o)
	}
	return table
}

const (
	disableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	enableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
)

// healthChecks reads the two variables with which NVIDIA's plugin is told which XIDs make a device unhealthy:
// the first ignores XIDs, the second, which wins, makes them count. Both may say "all". What a setting of
// this agent says about an XID (--xids) wins over both.
//
// To ignore all but some is what NVIDIA's comments and the change that brought DP_ENABLE_HEALTHCHECKS
// promise. Its code switches every check off as soon as all are to be ignored; here the promise is kept.
func healthChecks(p *core.HealthPolicy, lookupEnv func(string) (string, bool)) error {
	ignored, errIgnored := readXIDs(disableHealthChecks, lookupEnv)
	counted, errCounted := readXIDs(enableHealthChecks, lookupEnv)
	if err := errors.Join(errIgnored, errCounted); err != nil {
		return err
	}
	effects := map[uint64]xid.Effect{}
	for _, code := range ignored.some {
		effects[code] = xid.None
	}
	for _, code := range counted.some {
		effects[code] = xid.Withdraws
	}
	switch {
	case counted.all:
		p.AllXIDs = new(xid.Withdraws)
		clear(effects)
	case ignored.all && len(counted.some) == 0:
		p.Mode = core.ModeOff
	case ignored.all:
		p.AllXIDs = new(xid.None)
	}
	maps.Copy(effects, p.XIDs)
	p.XIDs = effects
	return nil
}

// xids are the XIDs that a variable names.
type xids struct {
	all  bool
	some []uint64
}

func readXIDs(name string, lookupEnv func(string) (string, bool)) (xids, error) {
	var x xids
	text, _ := lookupEnv(name)
	for item := range split(strings.ToLower(text)) {
		if item == "all" || item == "xids" {
			x.all = true
			continue
		}
		code, err := strconv.ParseUint(item, 10, 32)
		if err != nil || code == 0 {
			return xids{}, &core.ConfigError{Key: name, Value: text, Remedy: `want XIDs such as 48,79, or "all"`}
		}
		x.some = append(x.some, code)
	}
	return x, nil
}
