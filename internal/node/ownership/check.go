package ownership

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Check returns all reasons why GPUs can't get a target, joined; nil if there is none. With force an agent that gives a GPU up may be
// away.
func Check(rows []Row, to inventory.API, all []Facts, force bool) error {
	var errs []error
	taker := factsOf(all, AgentOf(to))
	if taker == nil {
		errs = append(errs, fmt.Errorf("%s does not run, or has another state_dir: it is to offer the GPUs through %s", AgentOf(to), to))
	}
	for _, r := range rows {
		if taker != nil && !slices.ContainsFunc(taker.GPUs, func(g GPUFacts) bool { return g.GPU == r.GPU && g.Offerable }) {
			errs = append(errs, fmt.Errorf("%s can't be offered by %s: its configuration leaves the GPU out, or it does not see it", r.GPU, taker.Agent))
		}
		if r.API == "" && !force && r.Target != to {
			errs = append(errs, fmt.Errorf("no running agent has %s: start the agent that had it, or use --force if no work has the GPU", r.GPU))
		}
	}
	return errors.Join(errs...)
}

// Warnings returns what an operator should know before GPUs get a target that they can have: each with its remedy.
func Warnings(rows []Row, to inventory.API, all []Facts) (lines []string) {
	if to == "" || len(rows) == 0 {
		return nil
	}
	taker := factsOf(all, AgentOf(to))
	if taker != nil && !slices.Contains(taker.APIs, to) {
		lines = append(lines, fmt.Sprintf("%s does not serve %s: restart it when the targets are set, with %s; until then %s",
			taker.Agent, to, needs(to), withoutServer(rows, taker.Agent)))
	}
	for _, api := range APIs() {
		f := factsOf(all, AgentOf(api))
		if f == nil || f.Unread[api] == "" {
			continue
		}
		leaves := slices.ContainsFunc(rows, func(r Row) bool { return api != to && slices.Contains(strings.Split(r.API, ","), string(api)) })
		switch {
		case leaves:
			lines = append(lines, fmt.Sprintf("GPUs don't leave %s without %s", api, f.Unread[api]))
		case api == to:
			lines = append(lines, fmt.Sprintf("GPUs that have come to %s don't leave it without %s", api, f.Unread[api]))
		}
	}
	return lines
}

// needs is what an agent must have to serve an API that it does not serve.
func needs(a inventory.API) string {
	if a == inventory.DRA {
		return "a token of the API server and NODE_NAME, as deploy/dra has them"
	}
	return "settings for it"
}

// withoutServer is what GPUs do that get a target which their agent does not serve so far.
func withoutServer(rows []Row, agent string) string {
	for _, r := range rows {
		for api := range strings.SplitSeq(r.API, ",") {
			if AgentOf(inventory.API(api)) != agent {
				return "GPUs that come from another agent take no work"
			}
		}
	}
	return "the GPUs stay where they are"
}

// factsOf returns the facts of an agent; nil without them.
func factsOf(all []Facts, agent string) *Facts {
	i := slices.IndexFunc(all, func(f Facts) bool { return f.Agent == agent })
	if i < 0 {
		return nil
	}
	return &all[i]
}
