package doctor

import "slices"

// chain is the state of the checks of which each needs the one before.
type chain struct {
	*Facts
	brokenBy string // check that found the problem for which the following ones fail; "" = none yet
}

// broken records that the following checks fail for the reason of a finding.
func (c *chain) broken(f Finding) []Finding {
	c.brokenBy = f.Check
	return []Finding{f}
}

// decide draws the conclusions from the facts.
func decide(f *Facts) []Finding {
	findings := append(decideConfig(f), f.lateReadings...)
	c := &chain{Facts: f}
	for _, late := range []string{"gpu", "library", "module", "nodes", "driver"} {
		if f.Late[late] && c.brokenBy == "" {
			c.brokenBy = late
		}
	}
	if f.Agent.released() {
		findings = append(findings, c.broken(Finding{
			"agent", Problem, "agent " + f.Program, "the agent has released the driver for maintenance (quiesce), and no device takes work",
			"when the maintenance is over: " + f.Program + " resume",
		})...)
	}
	for _, link := range []struct {
		name   string
		decide func(*chain) []Finding
	}{
		{"gpu", decidePCI}, {"library", decideLibrary}, {"module", decideModule}, {"nodes", decideNodes}, {"driver", decideDriver}, {"devices", decideDevices},
	} {
		if c.brokenBy != "" {
			if !f.Late[link.name] {
				findings = append(findings, Finding{link.name, Skipped, c.brokenBy, "not checked: see " + c.brokenBy, ""})
			}
			continue
		}
		findings = append(findings, link.decide(c)...)
	}
	for _, decide := range []func(*Facts) []Finding{
		decideLimits, decideAgent, decideOverlaps, decideProve, decideReset, decideState, decideKernelLog, decideToolkit, decideCDI, decideSecurity, decideClock, decideInotify, decideUser, decideOthers,
	} {
		findings = append(findings, decide(f)...)
	}
	return once(findings)
}

// once leaves out a problem that another check has found, too: what keeps GPUs from being proved and from being reset.
func once(all []Finding) (kept []Finding) {
	for _, f := range all {
		if !slices.ContainsFunc(kept, func(k Finding) bool { return f.Severity == Problem && k.Check != f.Check && k.Found == f.Found }) {
			kept = append(kept, f)
		}
	}
	return kept
}
