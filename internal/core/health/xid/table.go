package xid

import (
	"cmp"
	"fmt"
	"iter"
	"slices"
)

// ruleGroup is a Rule that several codes share, with their own columns.
type ruleGroup struct {
	Rule
	codes []codeEntry
}

// codeEntry has the columns of one code in NVIDIA's catalogue.
type codeEntry struct {
	code                     uint64
	name, meaning            string
	since                    int
	immediate, investigatory string
}

// engineCodes returns an entry for each engine of a kind, in order of the engine's number.
func engineCodes(name, meaning string, codes ...uint64) []codeEntry {
	rows := make([]codeEntry, len(codes))
	for i, code := range codes {
		rows[i] = codeEntry{code, fmt.Sprintf(name, i), fmt.Sprintf(meaning, i), 0, "RESTART_APP", "CONTACT_SUPPORT"}
	}
	return rows
}

// rules returns the rules of the groups, in order of code.
func rules(tables ...[]ruleGroup) []Rule {
	var rules []Rule
	for _, table := range tables {
		for _, t := range table {
			for _, c := range t.codes {
				r := t.Rule
				r.Code, r.Name, r.Meaning, r.RecoveryActionSince = c.code, c.name, c.meaning, c.since
				r.Immediate, r.Investigatory = c.immediate, c.investigatory
				r.SettledEffect = max(r.SettledEffect, r.Effect)
				rules = append(rules, r)
			}
		}
	}
	slices.SortFunc(rules, func(a, b Rule) int { return cmp.Compare(a.Code, b.Code) })
	return rules
}

var xids = rules(applications, notes, contained, resets, nodes, fabric, suspects, unused)

// XID returns the rule for an XID. A code that is not in the table has the rule for unknown codes, of class
// Suspect.
func XID(code uint64) Rule {
	if r, found := lookup(xids, code); found {
		return r
	}
	return unknown(code)
}

// Event returns the rule for an NVML event type that is a fault by itself. Other types have none: XIDs, a changed
// recovery action or MIG configuration, and a double-bit error, after which the next health check shows what
// happened.
func Event(kind uint64) (Rule, bool) { return lookup(events, kind) }

// XIDs yields the rules for the XIDs in the table, in order of code.
func XIDs() iter.Seq[Rule] { return slices.Values(xids) }

// Events yields the rules for NVML event types, in order of type.
func Events() iter.Seq[Rule] { return slices.Values(events) }

func lookup(rules []Rule, code uint64) (Rule, bool) {
	i, found := slices.BinarySearchFunc(rules, code, func(r Rule, code uint64) int {
		return cmp.Compare(r.Code, code)
	})
	if !found {
		return Rule{}, false
	}
	return rules[i], true
}
