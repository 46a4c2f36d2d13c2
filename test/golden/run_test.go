package golden

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// short are settings under which the agents decide in moments.
var short = map[string]string{
	"health_period": "100ms", "health_settle": "200ms", "recovery_dwell": "300ms", "recovery_limit": "100", "simulation": "true",
}

// TestRun runs both agents one after the other through the same script: start, faults, recovery, operator commands,
// reloads of the policy, stop. The log is compared as a set of lines, the state directory as files.
func TestRun(t *testing.T) {
	t.Parallel()
	for _, agent := range []string{k8sGPU, nomadGPU} {
		t.Run(agent, func(t *testing.T) {
			t.Parallel()
			script(newHost(t, "b200", "version: v1\n", nil), agent)
		})
	}
}

func script(h *host, agent string) {
	t := h.t
	p := h.start(agent, short)
	logged := func(step string, parts ...string) {
		t.Helper()
		p.await(step, func() string { return lineWith(p.logged(), parts) }, parts...)
	}
	inspect := func() string { return p.verb("inspect", "--json") }
	healthy := func() {
		t.Helper()
		p.await("all are healthy", func() string { return absence(inspect(), `"unhealthy"`, `"lost"`, `"degraded"`, `"unknown"`) }, "none")
	}
	p.await("start", func() string { return h.lists() + inspect() }, h.UUID(3), `"ready"`)
	healthy()

	must(t, h.XID(0, 48))
	logged("XID 48", "device unhealthy", h.UUID(0))
	logged("the recovery action for nothing", "device healthy", h.UUID(0))
	must(t, h.Set(1, "recovery_action", "1"))
	logged("the recovery action for a reset", "device unhealthy", h.UUID(1))
	must(t, h.Reset(1))
	logged("it was reset", "device healthy", h.UUID(1))
	must(t, h.Lose(3))
	logged("GPU 3 is lost", "device lost", h.UUID(3))
	must(t, h.Restore(3))
	logged("GPU 3 is back", "device healthy", h.UUID(3))

	var verbs []string
	do := func(args ...string) { verbs = append(verbs, p.verb(args...)) }
	must(t, h.Set(2, "recovery_action", "1")) // so that it does not recover meanwhile
	p.await("the recovery action for a reset", inspect, "RECOVERY_ACTION_GPU_RESET")
	do("simulate", "xid", "48", "--gpu=2")
	p.await("simulated XID", inspect, "XID_48")
	do("inspect")
	do("ignore", "--gpu=2", "--until=2099-01-01T00:00:00Z")
	do("inspect")
	do("clear", "--gpu=2", "--cause=XID_48")
	do("clear", "--gpu=9")
	do("clear", "--gpu=0", "--cause=XID_1")
	do("simulate", "gremlin", "1")
	must(t, h.Reset(2))
	healthy()
	do("quiesce", "--for=2h")
	p.await("quiesced", inspect, "maintenance")
	do("inspect")
	do("quiesce")
	do("quiesce", "--for=soon")
	do("resume")
	healthy()
	do("resume")
	do("rebind")
	compare(t, "verbs-"+agent, strings.Join(verbs, "\n"))

	reload := func(policy, step string, want ...string) {
		t.Helper()
		must(t, os.WriteFile(h.policy, []byte(policy), 0o600), syscall.Kill(p.pid, syscall.SIGHUP))
		p.await(step, func() string {
			return strings.ReplaceAll(p.logged(), "stays in force", "remains in effect") + inspect()
		}, want...)
	}
	reload(broken, "a policy with errors", "time-sharing", "remains in effect")
	reload(shares, "a policy with shares", `"time-slicing"`)
	healthy()

	must(t, h.Set(1, "recovery_action", "1"), h.Set(2, "recovery_action", "1"))
	p.await("two GPUs, one with four instances, want a reset", func() string { return strconv.Itoa(strings.Count(inspect(), `"schedulable": false`)) }, "5")
	must(t, h.XID(1, 95), h.XID(2, 94, simdriver.At{GI: 3, CI: 0}))
	p.await("XIDs", inspect, "XID_95", "XID_94")
	p.stop()
	compare(t, "log-"+agent, logLines(p.logged()))
	h.compareState(agent)
}

// lineWith is the first line that has all parts.
func lineWith(text string, parts []string) string {
	for line := range strings.Lines(text) {
		if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(line, part) }) {
			return line
		}
	}
	return ""
}

// absence is "none" if no word is in a text.
func absence(text string, words ...string) string {
	for _, w := range words {
		if strings.Contains(text, w) {
			return text
		}
	}
	return "none"
}

// perRun are the parts of a line of a log that are chance.
var perRun = regexp.MustCompile(`,"@timestamp":"[^"]*"|time=TIME |\b\d+(\.\d+)?(ns|µs|ms)\b`)

// logLines are the lines of a log, sorted, each once; without those about inotify, whose limit other processes may have reached.
func logLines(log string) string {
	seen := map[string]bool{}
	var lines []string
	for line := range strings.Lines(log) {
		line = perRun.ReplaceAllString(strings.TrimSuffix(line, "\n"), "")
		if !seen[line] && !strings.Contains(line, "inotify") {
			seen[line] = true
			lines = append(lines, line)
		}
	}
	return counted(lines)
}

// moments are the times in a state file.
var moments = regexp.MustCompile(`"20\d\d-[^"]*"`)

// checksums are those of a state file, which change with its times.
var checksums = regexp.MustCompile(`"crc32c:[^"]*"`)

// saved is the year in the times of the saved state directories: in the past on any machine.
const saved = "2024-"

// compareState compares the files that the agent left.
func (h *host) compareState(agent string) {
	h.t.Helper()
	var all strings.Builder
	dir := h.state(agent)
	must(h.t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		constant := checksums.ReplaceAllString(moments.ReplaceAllString(string(text), `"TIME"`), `"CHECKSUM"`)
		all.WriteString("======== " + masked(h.dir, path) + "\n" + masked(h.dir, constant) + "\n")
		if *save && err == nil && filepath.Ext(path) != ".lock" {
			to := filepath.Join("testdata", "state-"+agent, strings.TrimPrefix(path, dir))
			if text, err = statefile.Unseal(text); err != nil { // the checksum would be of other times
				return err
			}
			text := strings.ReplaceAll(string(text), `"`+time.Now().UTC().Format("2006-"), `"`+saved)
			err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, []byte(strings.ReplaceAll(text, h.dir, "/tmp")), 0o644))
		}
		return err
	}))
	compare(h.t, "state-"+agent, all.String())
}

// TestSavedState starts each agent on the state directory that an earlier process left: its conditions are there with
// their times.
func TestSavedState(t *testing.T) {
	t.Parallel()
	for _, agent := range []string{k8sGPU, nomadGPU} {
		t.Run(agent, func(t *testing.T) {
			t.Parallel()
			h := newHost(t, "b200", shares, func(h *host) error {
				for _, slot := range []int{1, 2} {
					must(h.t, h.Set(slot, "recovery_action", "1"))
				}
				return os.CopyFS(h.state(agent), os.DirFS(filepath.Join("testdata", "state-"+agent)))
			})
			p := h.start(agent, nil)
			var report string
			p.awaitStill(8, "the conditions of the history", func() string {
				report = p.verb("inspect")
				return h.lists() + p.logged() + report
			}, "ready", "XID_95", "XID_94", h.UUID(3))
			report += "\n" + logLines(p.logged())
			p.stop()
			history, err := os.ReadFile(filepath.Join(h.state(agent), agent+".json"))
			must(t, err)
			for _, text := range moments.FindAllString(read(t, "testdata/state-"+agent+"/"+agent+".json"), -1) {
				if text > `"`+saved && !strings.Contains(string(history), text) {
					t.Errorf("the time %s is no longer in the history", text)
				}
			}
			compare(t, "loaded-"+agent, report)
		})
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	return string(text)
}
