package agents

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// At its first start an agent reads the kernel log of this boot. An XID that nothing explains counts, in the first list of
// devices. The load of the driver, and the driver's recovery action, explain those before them.
func TestFaultsOfThisBootBeforeTheFirstStart(t *testing.T) {
	t.Parallel()
	fast := map[string]any{"health_period": "500ms", "health_settle": "1s", "recovery_dwell": "1s"}
	machines := []struct {
		name  string
		gpus  int
		tells bool // whether the driver reports a recovery action
	}{{"t4", 1, false}, {"h100x8", 8, true}, {"gb200", 4, true}}
	for i, m := range machines {
		start := func(t *testing.T, fill func(*kernelLog)) *agent {
			a := newAgent(t, programs[i%len(programs)], m.name, fast)
			log := a.useKernelLog()
			log.load()
			fill(log)
			a.start()
			return a
		}
		t.Run(m.name+", a fault", func(t *testing.T) {
			t.Parallel()
			a := start(t, func(log *kernelLog) {
				log.xid(0, 119, "Timeout after 6s of waiting for RPC response from GPU0 GSP!")
				for range 3 {
					log.xid(m.gpus-1, 31, "MMU Fault") // of an application
				}
			})
			if ids := a.firstUnhealthy(m.gpus); len(ids) != 1 || ids[0] != a.driver.UUID(0) {
				t.Errorf("unhealthy in the first list: %v", ids)
			}
			a.prints("XID_119", "inspect")
			a.prints("cleared", "clear", "--gpu=0")
			a.healthy(m.gpus, m.gpus)
			a.stop()
			a.start()
			a.healthy(m.gpus, m.gpus) // it is not read again
		})
		t.Run(m.name+", a fault before a load of the driver", func(t *testing.T) {
			t.Parallel()
			a := start(t, func(log *kernelLog) { log.xid(0, 119, "a fault"); log.load() })
			if ids := a.firstUnhealthy(m.gpus); len(ids) > 0 {
				t.Errorf("unhealthy in the first list: %v", ids)
			}
			a.counts("")
		})
		t.Run(m.name+", a fault that the driver has no action for", func(t *testing.T) {
			t.Parallel()
			a := start(t, func(log *kernelLog) { log.xid(0, 95, "Uncontained: LTC TAG") })
			if ids := a.firstUnhealthy(m.gpus); len(ids) != 1 {
				t.Errorf("unhealthy in the first list: %v", ids)
			}
			if !m.tells {
				a.prints("XID_95", "inspect")
				a.prints("cleared", "clear", "--gpu=0")
			}
			a.healthy(m.gpus, m.gpus)
		})
	}
}

func laterFormat(text []byte) []byte {
	return bytes.Replace(text, []byte(`"Version": 2`), []byte(`"Version": 3`), 1)
}

// A history that is damaged while no agent runs puts no faulty GPU back to work. It is a problem in all reports until an operator
// has seen it. A GPU whose kernel log shows no fault works on. An operator clears the others.
func TestDamagedHistory(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		loaded  bool // whether the kernel log reaches back to the load of the driver
		damage  func(text []byte) []byte
		healthy int
		cause   string // of GPU 3
	}{
		"cut":                       {false, func(text []byte) []byte { return text[:len(text)/2] }, 0, "FAULTS_UNKNOWN"},
		"empty, with all of a log":  {true, func([]byte) []byte { return nil }, 8, ""},
		"a later format":            {false, laterFormat, 7, "XID_95"},
		"a later format, and a log": {true, laterFormat, 7, "XID_95"},
	} {
		t.Run(name, func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				log := a.useKernelLog()
				if c.loaded {
					log.load()
				}
				a.start()
				a.healthy(8, 8)
				a.xid(3, 95)
				a.healthy(8, 7)
				a.stop()
				text, err := os.ReadFile(a.history())
				a.must(err, os.WriteFile(a.history(), c.damage(text), 0o600))
				restarted := func(when string) {
					a.start()
					var r report.Report
					a.await("a report of all GPUs", func() bool { r = a.report(); return len(r.Devices) == 8 && r.Source == report.FromAgent })
					a.healthy(8, c.healthy)
					if r.Devices[3].Cause != c.cause {
						t.Errorf("%s: GPU 3 is %s", when, r.Devices[3].Health)
					}
					if !slices.ContainsFunc(r.Problems, func(p problem.Problem) bool { return p.Code == problem.HistoryLoad }) {
						t.Errorf("%s: problems %v", when, r.Problems)
					}
				}
				restarted("after the damage")
				a.metrics(`tandem_health_source_up{source="history"} 0`)
				out, _ := a.command("doctor") // which ends with 1 for other reasons
				if !strings.Contains(out, "kept aside") || !strings.Contains(out, "FAULTS_UNKNOWN") {
					t.Errorf("doctor:\n%s", out)
				}
				a.kill()
				restarted("after another start")
				if c.cause == "FAULTS_UNKNOWN" {
					a.prints("cleared", "clear", "--gpu", "3")
					a.healthy(8, c.healthy+1)
				}
			})
		})
	}
}
