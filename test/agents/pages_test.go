package agents

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	promodel "github.com/prometheus/common/model"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

func freeAddress(t *testing.T) string {
	t.Helper()
	address, err := rig.FreeAddress()
	check.NoError(t, err)
	return address
}

// servePages gives nomad-gpu an HTTP address, too.
func (a *agent) servePages() {
	if a.program == nomadGPU {
		a.settings["http_address"] = freeAddress(a.T)
	}
}

// awaitPage waits until a page has that status and text.
func (a *agent) awaitPage(path string, want int, text string) {
	a.Helper()
	a.await(fmt.Sprint(path, " with ", want, " ", text), func() bool {
		code, page := a.get(path)
		return code == want && strings.Contains(page, text)
	})
}

// series are the lines of a page about one of our metrics, without their values.
func (a *agent) series() map[string]bool {
	_, page := a.get("/metrics")
	all := map[string]bool{}
	for line := range strings.Lines(page) {
		if end := strings.LastIndexByte(line, ' '); end > 0 && strings.HasPrefix(line, "tandem_") {
			name := line[:end]
			if all[name] {
				a.Errorf("twice on one page: %s", name)
			}
			all[name] = true
		}
	}
	return all
}

var uuidLabel = regexp.MustCompile(`(device|gpu)="[^"]*"`)

// Both agents serve the same pages. Every metric is in the reference with its type, and Prometheus' own checks find nothing. GPUs of
// one kind have the same series. The readings of a lost GPU end, and come back with it.
func TestPages(t *testing.T) {
	both(t, "h100x8", map[string]any{"call_deadline": "2s"}, func(a *agent) {
		a.servePages()
		a.startHealthy()
		a.awaitPage("/readyz", http.StatusOK, map[string]string{
			k8sGPU: "offered to the kubelet: nvidia.com/gpu", nomadGPU: "fingerprint sent to Nomad: nvidia/gpu/NVIDIA H100 80GB HBM3 (8)"}[a.program])
		a.awaitPage("/healthz", http.StatusOK, "ok")
		a.awaitPage("/inventory", http.StatusOK, a.driver.UUID(7))
		a.awaitPage("/", http.StatusOK, a.driver.UUID(7))
		a.awaitPage("/history.json", http.StatusOK, `"agent":"`+a.program+`"`)
		a.awaitPage("/history.json", http.StatusOK, `"powerWatts":[70`)
		a.awaitPage("/nothing", http.StatusNotFound, "")
		a.xid(3, 94)
		a.allocates(0)
		resource := map[string]string{k8sGPU: "nvidia.com/gpu", nomadGPU: "nvidia/gpu"}[a.program]
		id := a.driver.UUID(2)
		for _, line := range []string{
			`tandem_build_info{agent="` + a.program + `",`, `tandem_devices{health="degraded",resource="` + resource + `"} 1`,
			`tandem_device_pcie_link_width{device="` + id + `"} 16`, `tandem_device_nvlinks{device="` + id + `"} 18`,
			`tandem_device_power_watts{device="` + id + `"} 70`, `tandem_device_clock_hertz{clock="sm",device="` + id + `"} 3.45e+08`,
			`tandem_device_memory_total_bytes{device="` + id + `"} 8.5520809984e+10`, `tandem_device_utilization_ratio{device="` + id + `"} 0`,
			`tandem_xid_errors_total{gpu="` + a.driver.UUID(3) + `",xid="94"} 1`, `tandem_driver_calls_total{function="nvmlDeviceGetFieldValues"}`,
			`tandem_config_last_reload_successful 1`,
			map[string]string{k8sGPU: `tandem_request_duration_seconds_count{method="Allocate"} 1`, nomadGPU: `tandem_request_duration_seconds_count{method="Reserve"} 1`}[a.program],
			map[string]string{k8sGPU: `tandem_allocations_total{resource="nvidia.com/gpu"} 1`, nomadGPU: `tandem_reservations_total 1`}[a.program],
		} {
			a.awaitPage("/metrics", http.StatusOK, line)
		}
		a.lint()
		a.comparable(0)
		power := `tandem_device_power_watts{device="` + id + `"}`
		a.must(a.driver.Lose(2))
		a.awaitPage("/metrics", http.StatusOK, `tandem_device_health{device="`+id+`",model="NVIDIA H100 80GB HBM3",state="lost"} 1`)
		a.await("no reading of a lost GPU", func() bool { return !a.series()[power] })
		a.must(a.driver.Restore(2))
		a.await("its readings again", func() bool { return a.series()[power] })
	})
}

// comparable fails unless two GPUs without a fault have the same series.
func (a *agent) comparable(slot int) {
	a.Helper()
	of := map[string]int{}
	for s := range a.series() {
		for _, other := range []int{slot, slot + 1} {
			if strings.Contains(s, a.driver.UUID(other)) && !strings.HasPrefix(s, "tandem_device_info") {
				of[uuidLabel.ReplaceAllString(s, "$1")]++
			}
		}
	}
	for s, n := range of {
		if n != 2 {
			a.Errorf("one of two GPUs has %s", s)
		}
	}
	if len(of) < 60 {
		a.Errorf("%d series of a GPU", len(of))
	}
}

// lint checks the page with the rules of promtool, and with promtool itself where it is installed (Debian: prometheus), and that the
// reference has each metric.
func (a *agent) lint() {
	a.Helper()
	_, page := a.get("/metrics")
	problems, err := promlint.New(strings.NewReader(page)).Lint()
	if err != nil || len(problems) > 0 {
		a.Errorf("%v, %v", err, problems)
	}
	if promtool, err := exec.LookPath("promtool"); err == nil {
		check := exec.CommandContext(a.Context(), promtool, "check", "metrics")
		check.Stdin = strings.NewReader(page)
		if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
			a.Errorf("promtool check metrics: %v\n%s", err, out)
		}
	}
	reference, err := os.ReadFile("../../docs/metrics.md")
	a.must(err)
	parser := expfmt.NewTextParser(promodel.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(page))
	a.must(err)
	for name, f := range families {
		row := fmt.Sprintf("| `%s` | %s |", name, strings.ToLower(f.GetType().String()))
		if strings.HasPrefix(name, "tandem_") && !strings.Contains(string(reference), row) {
			a.Errorf("docs/metrics.md has no row %s", row)
		}
	}
}

// A driver that hangs delays no page: a scrape makes no driver call.
func TestPagesWhileTheDriverHangs(t *testing.T) {
	both(t, "h100x8", map[string]any{"call_deadline": "2s"}, func(a *agent) {
		a.servePages()
		a.startHealthy()
		a.awaitPage("/metrics", http.StatusOK, `tandem_device_power_watts{device="`+a.driver.UUID(0)+`"}`)
		for slot := range 8 {
			a.must(a.driver.Hang(simdriver.GPU(slot), "nvmlDeviceGetFieldValues"))
		}
		a.awaitPage("/metrics", http.StatusOK, "tandem_driver_calls_stuck 8")
		fastest := time.Minute // one that waited for the driver would take its deadline each time
		for range 5 {
			at := time.Now()
			if code, page := a.get("/metrics"); code != http.StatusOK || !strings.Contains(page, "tandem_driver_calls_total") {
				a.Errorf("%d: %s", code, page)
			}
			fastest = min(fastest, time.Since(at))
		}
		if fastest > time.Second {
			a.Errorf("the fastest of 5 scrapes took %v", fastest)
		}
		a.awaitPage("/healthz", http.StatusOK, "ok")
		a.must(a.driver.Heal())
	})
}

// Without its port, which another process has, an agent offers GPUs, logs the problem once, and listens when the port is free.
func TestPortInUse(t *testing.T) {
	both(t, "t4", nil, func(a *agent) {
		taken, err := net.Listen("tcp", "127.0.0.1:0")
		a.must(err)
		address, began := taken.Addr().String(), time.Now()
		a.settings["http_address"] = address
		a.start()
		a.healthy(1, 1)
		a.logs("WARN", "HTTP server unavailable, retrying", "address already in use")
		a.prints("no HTTP at "+address+": listen tcp", "inspect")
		a.await("some attempts", func() bool { return time.Since(began) > 4*time.Second })
		if n := a.times("HTTP server unavailable"); n != 1 {
			a.Errorf("the problem is logged %d times", n)
		}
		a.must(taken.Close())
		a.logs("INFO", "listening", "http="+address)
		a.awaitPage("/readyz", http.StatusOK, map[string]string{k8sGPU: "offered to the kubelet: nvidia.com/gpu", nomadGPU: "nvidia/gpu/Tesla T4 (1)"}[a.program])
		if out, err := a.command("inspect"); err != nil || strings.Contains(out, "no HTTP") {
			a.Errorf("%v:\n%s", err, out)
		}
	})
}

// nomad-gpu listens at the address of the latest config block only, and nowhere without an address.
func TestNomadPagesMove(t *testing.T) {
	t.Parallel()
	a := newAgent(t, nomadGPU, "t4", nil)
	closed := func(address string) {
		t.Helper()
		a.await("the end of the server", func() bool {
			conn, err := net.Dial("tcp", address)
			if err == nil {
				_ = conn.Close()
			}
			return err != nil
		})
	}
	a.servePages()
	a.start()
	a.awaitPage("/readyz", http.StatusOK, "nvidia/gpu/Tesla T4 (1)")
	first := a.address()
	a.servePages()
	a.configure()
	a.await("the second address", func() bool { return a.address() == a.settings["http_address"] })
	a.awaitPage("/metrics", http.StatusOK, "tandem_fingerprint_responses_total")
	closed(first)
	delete(a.settings, "http_address")
	a.configure()
	closed(a.address())
	a.healthy(1, 1)
}
