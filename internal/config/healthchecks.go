package config

import (
	"errors"
	"maps"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/health/xid"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

const (
	disableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	enableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
)

// healthChecks reads the two variables of NVIDIA's plugin that select the XIDs that make a device unhealthy: the first
// lists XIDs to ignore, the second, which has precedence, XIDs with an effect. Both may be "all". The option xids has
// precedence over both.
//
// With DP_DISABLE_HEALTHCHECKS=all, NVIDIA's comments, and the change that added DP_ENABLE_HEALTHCHECKS, promise that the
// XIDs of the second variable have an effect. Its code ignores all XIDs in that case; here the promise holds.
func healthChecks(p *health.Policy, lookupEnv func(string) (string, bool)) error {
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
		p.Mode = health.ModeOff
	case ignored.all:
		p.AllXIDs = new(xid.None)
	}
	maps.Copy(effects, p.XIDs)
	p.XIDs = effects
	return nil
}

// xids are the XIDs of a variable.
type xids struct {
	all  bool
	some []uint64
}

func readXIDs(name string, lookupEnv func(string) (string, bool)) (xids, error) {
	var x xids
	text, _ := lookupEnv(name)
	for _, item := range (Value{Text: strings.ToLower(text)}).items() {
		if item == "all" || item == "xids" {
			x.all = true
			continue
		}
		code, err := strconv.ParseUint(item, 10, 32)
		if err != nil || code == 0 {
			return xids{}, &setting.Error{Key: name, Value: text, Remedy: `want XIDs such as 48,79, or "all"`}
		}
		x.some = append(x.some, code)
	}
	return x, nil
}
