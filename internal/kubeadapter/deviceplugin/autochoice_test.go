package deviceplugin

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// What "auto" means is logged when it is known and when it changes, with the reason; a strategy that an operator listed never is.
func TestAutoChoiceIsLoggedOnce(t *testing.T) {
	usable := func(reason string) *inventory.CDI { return &inventory.CDI{Usable: true, Reason: reason} }
	for mode, want := range map[inventory.CDIMode]string{
		inventory.CDIAuto:     "envvar,cdi-cri written|envvar no hooks|envvar,cdi-cri written",
		inventory.CDIRequired: "",
	} {
		cfg := core.DefaultConfig()
		cfg.Injection.CDI = mode
		var out bytes.Buffer
		log := slog.New(slog.NewTextHandler(&out, nil))
		var choice autoChoice
		for _, cdi := range []*inventory.CDI{
			nil, usable("written"), usable("written again"), {Reason: "no hooks"}, {Reason: "disk full"}, usable("written"), nil, usable("written"),
		} {
			choice.log(log, core.Build(coretest.GPUs(2), health.Ledger{}, cfg).WithHost(inventory.Host{CDI: cdi}, cfg.Overlap))
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			_, text, _ := strings.Cut(strings.TrimSpace(line), "strategies=")
			got = append(got, strings.ReplaceAll(strings.ReplaceAll(text, "reason=", ""), `"`, ""))
		}
		if text := strings.Join(got, "|"); text != want {
			t.Errorf("mode %d: %q, want %q", mode, text, want)
		}
	}
}
