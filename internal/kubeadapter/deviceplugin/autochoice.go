package deviceplugin

import (
	"log/slog"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// autoChoice is what the strategy "auto" means at present; the zero value is not known yet. Only one goroutine uses it.
type autoChoice struct{ known, cdi bool }

// log logs the choice when it changes. It can change at any time; containers that have their devices keep them.
func (c *autoChoice) log(to *slog.Logger, inv *inventory.Allocatable) {
	cdi := inv.CDI()
	if cdi == nil || cdi.Incarnation != inv.Incarnation() || c.known && c.cdi == cdi.Usable {
		return
	}
	auto := false
	for u := range inv.Devices() {
		auto = auto || u.Injection.CDI == inventory.CDIAuto
	}
	if !auto {
		return
	}
	*c = autoChoice{known: true, cdi: cdi.Usable}
	strategies := "envvar"
	if cdi.Usable {
		strategies = "envvar,cdi-cri"
	}
	to.Info("device list strategy of auto", "strategies", strategies, "reason", cdi.Reason)
}
