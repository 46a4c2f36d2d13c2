package main

import (
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/fault"
)

const (
	disableHealthChecks = "DP_DISABLE_HEALTHCHECKS"
	enableHealthChecks  = "DP_ENABLE_HEALTHCHECKS"
)

// healthChecks reads the two variables with which NVIDIA's plugin says which XIDs make a device
// unhealthy. The first adds XIDs to those that are ignored, or, with "all" or "xids", ignores every one;
// the second, which wins, takes XIDs (or "all") out again, also out of those ignored by default.
func healthChecks(p *core.HealthPolicy, lookupEnv func(string) (string, bool)) error {
	disabled, err := readXIDs(disableHealthChecks, lookupEnv)
	if err != nil {
		return err
	}
	enabled, err := readXIDs(enableHealthChecks, lookupEnv)
	if err != nil {
		return err
	}
	switch {
	case enabled.all:
		p.AllXIDs = new(fault.Withdraws)
		return nil
	case disabled.all && len(enabled.some) == 0:
		p.Mode = core.ModeOff
		return nil
	case disabled.all:
		p.AllXIDs = new(fault.None)
	}
	p.XIDs = map[uint64]fault.Effect{}
	for _, xid := range disabled.some {
		p.XIDs[xid] = fault.None
	}
	for _, xid := range enabled.some {
		p.XIDs[xid] = fault.Withdraws
	}
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
			return xids{all: true}, nil
		}
		xid, err := strconv.ParseUint(item, 10, 64)
		if err != nil {
			return xids{}, &core.ConfigError{Key: name, Value: text, Remedy: `want XIDs such as 48,79, or "all"`}
		}
		x.some = append(x.some, xid)
	}
	return x, nil
}
