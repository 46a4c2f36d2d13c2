package shadow

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// nodeAPI is the part of the API of a Nomad agent that shadow reads: a node with the devices of another plugin.
func nodeAPI(t *testing.T, token string, groups ...map[string]any) *httptest.Server {
	t.Helper()
	answer := func(w http.ResponseWriter, r *http.Request, value any) {
		if r.Header.Get("X-Nomad-Token") != token {
			http.Error(w, "Permission denied", http.StatusForbidden)
			return
		}
		if err := json.NewEncoder(w).Encode(value); err != nil {
			t.Error(err)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/agent/self", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, map[string]any{"stats": map[string]any{"client": map[string]string{"node_id": "n1"}}})
	})
	mux.HandleFunc("GET /v1/node/n1", func(w http.ResponseWriter, r *http.Request) {
		answer(w, r, map[string]any{"Name": "client1", "NodeResources": map[string]any{"Devices": groups}})
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server
}

// device is a device of a node.
func device(id, pci string, healthy bool) map[string]any {
	return map[string]any{"ID": id, "Healthy": healthy, "Locality": map[string]string{"PciBusID": pci}}
}

// Beside nomad-device-nvidia on a node with a lost GPU: the values that it reports (its fingerprint.go and nvml/driver_linux.go, 1.1.0), the
// address of the PCI bus padded with zero bytes, draw in place of the limit of power, every GPU healthy.
func TestNomad(t *testing.T) {
	m := simdriver.Start(t, "h100x8")
	var devices []any
	for slot := range 8 {
		pci, err := m.Get(slot, "pci")
		must(t, err)
		devices = append(devices, device(m.UUID(slot), "0000"+strings.ToUpper(pci)+"\x00\x00\x00", true))
	}
	must(t, m.Fail(simdriver.GPU(6), "*", "GPU_IS_LOST", simdriver.Always))
	number := func(n int, unit string) map[string]any { return map[string]any{"Int": n, "Unit": unit} }
	server := nodeAPI(t, "secret", map[string]any{
		"Vendor": "nvidia", "Type": "gpu", "Name": "NVIDIA H100 80GB HBM3", "Instances": devices,
		"Attributes": map[string]any{
			"memory": number(81559, "MiB"), "power": number(71, "W"), "cores_clock": number(345, "MHz"), "display_state": map[string]any{"String": "1"},
		},
	}, map[string]any{"Vendor": "example", "Type": "fpga", "Name": "x", "Instances": []any{device("f", "", true)}})
	token := filepath.Join(t.TempDir(), "token")
	must(t, os.WriteFile(token, []byte("secret\n"), 0o600))
	config := filepath.Join(t.TempDir(), "client.hcl")
	must(t, os.WriteFile(config, []byte(`plugin "nomad-device-nvidia" {
  config {
    ignored_gpu_ids = ["`+m.UUID(7)+`"]
    driver_root     = "`+m.Root+`"
    sysfs_root      = "`+m.Root+`/sys"
    procfs_root     = "`+m.Root+`/proc"
  }
}`), 0o600))
	cmd := command(t, "nomad-gpu", "shadow", "--address", server.URL, "--token-file", token, "--nomad-config", config)
	goldenfile.Compare(t, "testdata/nomad.golden", render(report(t, cmd)))

	cmd = command(t, "nomad-gpu", "shadow", "--address", server.URL, "--nomad-config", config)
	if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "agent:read, node:read") {
		t.Errorf("without a token: %v, %s", err, out)
	}
}
