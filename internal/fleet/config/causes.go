package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// causes is a list of causes of faults.
func causes(list document.Value) (all []string) {
	for _, v := range list.Items() {
		cause, ok := v.Scalar()
		switch {
		case !ok:
		case !known(cause):
			v.Failf("%s", meant(cause))
		case !slices.Contains(all, cause):
			all = append(all, cause)
		}
	}
	return all
}

// known reports whether a condition can have the cause. Each XID has one: drivers have XIDs of which this program knows nothing.
func known(cause string) bool {
	prefix, code, _ := strings.Cut(cause, "_")
	var c health.Condition
	var err error
	switch prefix {
	case "XID":
		c.Reason = health.ReasonXID
		c.Code, err = strconv.ParseUint(code, 10, 32)
	case "EVENT":
		c.Reason = health.ReasonEvent
		c.Code, err = strconv.ParseUint(code, 0, 64)
	default:
		return slices.Contains(named(), cause)
	}
	return err == nil && c.Code > 0 && c.Cause() == cause
}

// named are the causes without a number of their own.
func named() (all []string) {
	for _, r := range health.Reasons() {
		if r != health.ReasonXID && r != health.ReasonEvent && r != health.ReasonRecoveryAction {
			all = append(all, r.String())
		}
	}
	for v := health.RecoveryReset; v <= health.RecoveryOther; v++ {
		c := health.Condition{Reason: health.ReasonRecoveryAction, Code: uint64(v)}
		all = append(all, c.Cause())
	}
	return all
}

// meant is the remedy for a cause that is not known.
func meant(written string) string {
	if upper := strings.ToUpper(written); known(upper) {
		return fmt.Sprintf("did you mean %s?", upper)
	}
	if n, err := strconv.ParseUint(strings.TrimLeft(strings.ToUpper(written), "XID_ "), 10, 32); err == nil && n > 0 {
		return fmt.Sprintf("did you mean XID_%d?", n)
	}
	if name, ok := document.Near(written, named()); ok {
		return fmt.Sprintf("did you mean %s?", name)
	}
	return "want a cause such as XID_95, LOST or RECOVERY_ACTION_GPU_RESET: docs/faults.md has the XIDs, docs/operations.md the others"
}
