package core_test

import (
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func devices(inv *core.Inventory) string {
	var ids []core.UnitID
	for u := range inv.Devices() {
		ids = append(ids, u.ID)
	}
	return unitNames(ids)
}

// Devices yields each device once: as it is offered now, not as it was.
func TestDevices(t *testing.T) {
	alone, two := core.Build(coretest.GPUs(3), core.Ledger{}, core.DefaultConfig()), sharedGPUs(sliced(2), false)
	less := core.Build(without(coretest.GPUs(3), coretest.GPU(1)), core.Ledger{}, core.DefaultConfig())
	for name, tc := range map[string]struct {
		inv  *core.Inventory
		want string
	}{
		"nothing":         {nil, ""},
		"not shared":      {alone, "0 1 2"},
		"shared":          {two, "0::0 1::0 2::0"},
		"shared by fewer": {two.WithRetiring(sharedGPUs(sliced(3), false), testStart, time.Minute), "0::0 1::0 2::0"},
		"shared now":      {two.WithRetiring(alone, testStart, time.Minute), "0::0 1::0 2::0"},
		"shared no more":  {alone.WithRetiring(two, testStart, time.Minute), "0 1 2"},
		"withdrawn":       {less.WithRetiring(alone, testStart, time.Minute), "0 1 2"},
	} {
		if got := devices(tc.inv); got != tc.want {
			t.Errorf("%s: %s, want %s", name, got, tc.want)
		}
	}
	for u := range two.Devices() {
		if u.Replica != 0 {
			t.Error(u.ID)
		}
		break // stop after the first
	}
}
