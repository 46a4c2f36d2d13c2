package golden

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// step is something that happens to a machine, and what is then in the reports of both agents.
type step struct {
	happens func(*host) error // nil: the agents start
	want    []string
}

func start(want ...string) []step { return []step{{want: want}} }

// scenes are the machines; the pages are taken after the last step.
var scenes = []struct {
	name, machine, policy string
	prepare               func(*host) error
	steps                 []step
	events                string // awaited in the metrics after the other steps: whether events of all GPUs are received
	check                 string // reservation_check
	overlap               string // "" = refuse
}{
	{name: "h100x8", machine: "h100x8", steps: start(`"index": 7`)},
	{name: "a30 with MIG", machine: "a30", steps: start(`"index": 1`)},
	{name: "gb200", machine: "gb200", steps: start(`"index": 1`)},
	{
		name: "consumer, one state directory", machine: "consumer", overlap: "warn",
		prepare: func(h *host) error { h.shared = true; return nil }, steps: start(`"agent": `),
	},
	{name: "no GPUs", machine: "none", steps: start(`"ready"`)},
	{
		name: "t4, reservations checked", machine: "t4", check: "refuse",
		prepare: func(h *host) error { return h.StartProcess(0, 2114, 512) }, steps: start(`"processes"`),
	},
	{name: "no driver", machine: "t4", prepare: func(h *host) error { return h.Hide() }, steps: start(`"absent"`)},
	{
		name: "h100x8 with a policy", machine: "h100x8", policy: mixed,
		prepare: func(h *host) error {
			coretest.MPSDaemon(h.t, mps.Pipe(filepath.Join(h.dir, "mps"), "gpu.mps"))
			return nil
		}, steps: start(`"index": 4`, "MPS_DAEMON_DOWN"),
	},
	{
		name: "b200 with faults", machine: "b200", events: "1", // again: the wait fails when GPU 0 is lost, and is renewed
		prepare: func(h *host) error { return h.Fail(simdriver.GPU(3), "*", "UNKNOWN", simdriver.Always) },
		steps: []step{
			{want: []string{`"index": 2`}},
			{
				func(h *host) error { return errors.Join(h.XID(1, 95), h.XID(2, 94, simdriver.At{GI: 3, CI: 0})) },
				[]string{"XID_95", "XID_94"},
			},
			{func(h *host) error { return h.Set(1, "recovery_action", "1") }, []string{"RECOVERY_ACTION_GPU_RESET", `"recoveryAction"`}},
			{func(h *host) error { return h.Lose(0) }, []string{`"lost"`}},
		},
	},
}

// usageRead is longer than the interval at which the agents read what the devices do (internal/node/usage).
const usageRead = 4 * time.Second

func TestScenes(t *testing.T) {
	t.Parallel()
	var all pages
	var titles []string
	t.Run("scene", func(t *testing.T) {
		for _, s := range scenes {
			titles = append(titles, s.name)
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				h := newHost(t, s.machine, s.policy, s.prepare)
				more := map[string]string{"health_period": "200ms"}
				if s.check != "" {
					more["reservation_check"] = s.check
				}
				if s.overlap != "" {
					more["overlap"] = s.overlap
				}
				k, n := h.startK8s(more), h.startNomad(more)
				for _, step := range s.steps {
					if step.happens != nil {
						must(t, step.happens(h))
					}
					k.awaitStill(8, "inventory", func() string { return h.lists() + k.get("/readyz") + k.get("/inventory") }, append(step.want, "200 OK")...)
					n.awaitStill(4, "fingerprint", func() string { return n.fingerprint() + n.verb("inspect", "--json") }, step.want...)
				}
				time.Sleep(usageRead)
				if s.events != "" {
					k.awaitStill(0, "metrics", func() string { return k.get("/metrics") }, `tandem_health_source_up{source="events"} `+s.events)
				}
				inventory := k.get("/inventory")
				all.add("inventory", s.name, inventory)
				all.add("http", s.name, k.get("/healthz")+"\n"+k.get("/readyz"))
				series, comments := foldedMetrics(k.get("/metrics"))
				all.add("metrics", s.name, series)
				if s.name == scenes[len(scenes)-1].name {
					all.add("metrics-help", s.name, comments)
				}
				report := k.verb("inspect", "--json")
				all.add("inspect", s.name, k.verb("inspect")+"\n"+n.verb("inspect")+"\n"+unlessSame(report, inventory)+"\n"+unlessSame(n.verb("inspect", "--json"), inventory))
				all.add("kubelet", s.name, h.kubeletPage())
				all.add("nomad", s.name, n.nomadPage())
				all.add("debug", s.name, foldedDebug(k)+foldedDebug(n))
				k.stop()
				n.stop()
				settings := []string{"inspect", "--state-dir=" + h.state(nomadGPU),
					"--driver-root=" + h.Root, "--sysfs-root=" + h.Root + "/sys", "--procfs-root=" + h.Root + "/proc", "--policy-file=" + h.policy}
				config := h.config(k8sGPU, map[string]string{"config_file": h.policy})
				if s.overlap != "" { // without it, what each shows would depend on which agent claimed first
					config["overlap"] = s.overlap
					block := filepath.Join(h.dir, "client.hcl")
					must(t, os.WriteFile(block, []byte(`plugin "nomad-gpu" { config { overlap = "`+s.overlap+`" } }`), 0o600))
					settings = append(settings, "--nomad-config="+block)
				}
				alone := transcript(t.Context(), h.dir, k8sGPU, append(rig.Flags(config), "inspect")...)
				_, alone, _ = strings.Cut(alone, "\n")
				all.add("inspect-without-agent", s.name, "$ k8s-gpu inspect\n"+alone+"\n"+transcript(t.Context(), h.dir, nomadGPU, settings...))
			})
		}
	})
	all.compare(t, titles)
}

// unlessSame is a transcript whose output is left out where it is that of a page, apart from the name of the injection and
// from what is known of owners, which differ between the agents.
func unlessSame(transcript, page string) string {
	title, output, _ := strings.Cut(transcript, "\n")
	if _, body, _ := strings.Cut(page, "\n"); configured.ReplaceAllString(output, "") == configured.ReplaceAllString(body, "") {
		output = "(as GET /inventory)\n"
	}
	return title + "\n" + output
}

var (
	uuids      = regexp.MustCompile(`(GPU|MIG)-[0-9a-f-]{36}`)
	unsteady   = regexp.MustCompile(`^[a-z_]*(_seconds|_bytes|_seconds_sum|_seconds_count|_seconds_bucket|lists_total|responses_total|transitions_total)(\{.*\})? `)
	perCall    = regexp.MustCompile(`^(tandem_driver_call[a-z_]*_total)\{function=".*"\} `) // which calls were made depends on the moment
	numbers    = regexp.MustCompile(`\b\d+\b`)
	configured = regexp.MustCompile(`      "configured": ".*",\n|(?s:  "ownersUnknown": \{.*?\n  \},\n)`)
	spaces     = regexp.MustCompile(`  +`)
	inGoOrOS   = regexp.MustCompile(`^(go|process)_`)
)

// foldedMetrics has a line for the series that differ in the device only, without values that are times or sizes.
// The comments are apart.
func foldedMetrics(page string) (series, comments string) {
	var lines, about []string
	for line := range strings.Lines(page) {
		line = strings.TrimSuffix(line, "\n")
		switch name, _, _ := strings.Cut(line, " "); {
		case strings.HasPrefix(line, "#"):
			about = append(about, line)
		case strings.HasPrefix(line, "GET") || inGoOrOS.MatchString(line):
		case perCall.MatchString(line):
			if line = perCall.FindStringSubmatch(line)[1] + "{function} VALUE"; !slices.Contains(lines, line) {
				lines = append(lines, line)
			}
		case unsteady.MatchString(line):
			lines = append(lines, uuids.ReplaceAllString(name, "$1-ID")+" VALUE")
		default:
			lines = append(lines, uuids.ReplaceAllString(line, "$1-ID"))
		}
	}
	return counted(lines), strings.Join(about, "\n") + "\n"
}

// foldedDebug is the debug view at a time without a driver call, without goroutines and numbers.
func foldedDebug(p *process) string {
	var view string
	p.awaitStill(0, "debug", func() string {
		view, _, _ = strings.Cut(p.verb("debug"), "\ngoroutine ")
		return fmt.Sprintf("a driver call: %v", strings.Contains(view, "\nDRIVER CALL"))
	}, "false")
	return spaces.ReplaceAllString(numbers.ReplaceAllString(view, "N"), "  ") + "\n"
}
