package nomad

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
)

// page is a page of the plugin; "" if it does not answer with 200.
func page(t testing.TB, address, path string) string {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, nil)
	must(t, err)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return ""
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return ""
	}
	return string(text)
}

// Under Nomad's device manager the plugin serves its pages, which follow what Nomad has taken and asked for. promtool, if it is
// installed, accepts the metrics. The process that validates the configuration does not listen: the port would be in use.
func Test43Pages(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	address := l.Addr().String()
	must(t, l.Close())
	m, a, groups := onMachine(t, "h100x8", map[string]any{"http_address": address}, 8)
	await(t, "readiness", func() bool {
		return strings.Contains(page(t, address, "/readyz"), "fingerprint sent to Nomad: nvidia/gpu/NVIDIA H100 80GB HBM3 (8)")
	})
	if strings.Contains(a.logs.String(), "HTTP server unavailable") {
		t.Error("the port was in use")
	}
	if text := page(t, address, "/healthz"); text != "ok\n" {
		t.Errorf("/healthz: %q", text)
	}
	all := ids(groups)
	for _, id := range all[:3] {
		if _, err := a.reserve(groups[0], id); err != nil {
			t.Fatal(err)
		}
	}
	m.ctl(t, "lose", "4")
	a.devices(t, 8, 7)
	for _, line := range []string{
		`tandem_build_info{agent="nomad-gpu"`, "tandem_reservations_total 3", `tandem_request_duration_seconds_count{method="Reserve"} 3`,
		"tandem_device_groups 1", `tandem_devices{health="lost",resource="nvidia/gpu"} 1`,
		fmt.Sprintf("tandem_device_power_watts{device=%q} 70", m.uuid(t, 0)), `tandem_driver_calls_total{function="nvmlInit"} 1`,
	} {
		await(t, line, func() bool { return strings.Contains(page(t, address, "/metrics"), "\n"+line) })
	}
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("promtool (Debian: prometheus) is not installed")
	}
	check := exec.CommandContext(t.Context(), promtool, "check", "metrics")
	check.Stdin = strings.NewReader(page(t, address, "/metrics"))
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("promtool check metrics: %v\n%s", err, out)
	}
}
