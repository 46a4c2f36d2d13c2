//go:build packages

package packages

import (
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	unit     = "k8s-gpu.service"
	mpsUnit  = "nomad-gpu-mps-daemon.service"
	fleet    = "gpu-fleet.service"
	ledger   = "/var/lib/gpu-fleet/ledger.json"
	enabled  = "/etc/systemd/system/multi-user.target.wants/" + unit
	defaults = "/etc/default/k8s-gpu"
	resource = "nvidia.com/gpu"
	driver   = "/srv/driver"
)

// TestDebian installs, upgrades, removes and purges the packages on a machine with eight simulated GPUs and a kubelet's device manager.
// Each step depends on the one before it.
func TestDebian(t *testing.T) {
	next := nextPackages(t)
	root := newDebian(t)
	gpus, err := simdriver.Install(t.Context(), root+driver, "h100x8")
	if err != nil {
		t.Fatal(err)
	}
	m := boot(t, root)
	kubelet := kubelettest.New(root + "/var/lib/kubelet/device-plugins")
	debs := func(folder, version string) (files []string) {
		for _, s := range all {
			files = append(files, debFile(folder, s.name, version, runtime.GOARCH))
		}
		return files
	}
	for _, step := range []struct {
		name string
		run  func(t *testing.T)
	}{
		{"install", func(t *testing.T) { checkInstall(t, m, m.install(t, debs(*packages, *version)...)) }},
		{"an upgrade does not start the service", func(t *testing.T) {
			m.install(t, debs(next, "99.0.0")...)
			if got := m.unit(t, "ActiveState,UnitFileState", unit); got != "inactive\ndisabled" {
				t.Errorf("after an upgrade the service is %q", got)
			}
			m.install(t, debs(*packages, *version)...) // a downgrade
		}},
		{"the service offers GPUs", func(t *testing.T) { checkService(t, m, kubelet) }},
		{"its hardening", func(t *testing.T) { checkHardening(t, m) }},
		{"reload, end", func(t *testing.T) { checkSignals(t, m, kubelet) }},
		{"gpu-fleet", func(t *testing.T) { checkFleet(t, m) }},
		{"upgrade", func(t *testing.T) { checkUpgrade(t, m, debs(next, "99.0.0")) }},
		{"remove", func(t *testing.T) { checkRemove(t, m) }},
		{"purge", func(t *testing.T) { checkPurge(t, m) }},
	} {
		if !t.Run(step.name, step.run) {
			t.FailNow()
		}
	}
	kubelet.Stop()
	if got, err := gpus.Violations(); err != nil || len(got) > 0 {
		t.Errorf("misuse of the driver: %q, %v", got, err)
	}
}

// checkInstall expects that an installation starts and enables nothing, and prints no advice without a Nomad.
func checkInstall(t *testing.T, m *machine, output string) {
	if strings.Contains(output, "restart") {
		t.Errorf("no Nomad runs, and dpkg prints\n%s", output)
	}
	for _, name := range []string{unit, mpsUnit, fleet} {
		if got := m.unit(t, "ActiveState,UnitFileState", name); got != "inactive\ndisabled" {
			t.Errorf("%s is %q", name, got)
		}
	}
	m.checkExists(t, false, enabled, "/var/lib/tandem")
	for _, binary := range []string{"nomad-gpu", "/opt/nomad/data/plugins/nomad-gpu", "k8s-gpu", "gpu-fleet"} {
		if out := m.run(t, binary, "version"); !strings.HasSuffix(out, " "+*version) {
			t.Errorf("%s version: %s", binary, out)
		}
	}
	m.run(t, "nomad-gpu", "validate", "--nomad-config", "/etc/nomad.d/nomad-gpu.hcl")
	if out := m.run(t, "systemd-analyze", "verify", "--man=no", unit, mpsUnit, fleet); out != "" {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	if left := m.run(t, "dpkg", "--audit"); left != "" {
		t.Error(left)
	}
	if changed := m.run(t, "dpkg", "--verify", "tandem-nomad-gpu", "tandem-k8s-gpu", "tandem-gpu-fleet"); changed != "" {
		t.Error(changed)
	}
}

// checkService has the service use the simulated driver, which needs a drop-in because its library writes into its folder.
func checkService(t *testing.T, m *machine, kubelet *kubelettest.Kubelet) {
	for name, path := range map[string]string{"NVIDIA_DRIVER_ROOT": "", "SYSFS_ROOT": "/sys", "PROCFS_ROOT": "/proc"} {
		m.edit(t, defaults, name+"="+driver+path)
	}
	m.write(t, "/etc/systemd/system/k8s-gpu.service.d/driver.conf", "[Service]\nReadWritePaths="+driver+"\n")
	m.run(t, "systemctl", "daemon-reload")
	m.run(t, "systemctl", "enable", "--now", unit)
	m.checkExists(t, true, enabled, "/var/lib/kubelet/device-plugins", "/run/cdi")
	if err := kubelet.Start(); err != nil {
		t.Fatal(err)
	}
	if err := kubelet.AwaitHealthy(t.Context(), resource, 8); err != nil {
		t.Fatalf("%v\n%s", err, m.run(t, "journalctl", "--no-pager", "--unit", unit))
	}
	if out := m.run(t, "k8s-gpu", "inspect"); strings.Count(out, "GPU-") < 8 {
		t.Errorf("k8s-gpu inspect:\n%s", out)
	}
	page := run(t, "nsenter", "--target", m.leader, "--net", "--", "bash", "-c",
		`exec 3<>/dev/tcp/127.0.0.1/9410; printf 'GET /readyz HTTP/1.0\r\n\r\n' >&3; cat <&3`)
	if !strings.Contains(page, " 200 OK") {
		t.Errorf("/readyz: %s", page)
	}
}

// checkHardening looks at the process from the outside, and has processes of other services try what it must not do.
func checkHardening(t *testing.T, m *machine) {
	pid := m.unit(t, "MainPID", unit)
	status := m.run(t, "cat", "/proc/"+pid+"/status")
	for _, want := range []string{"NoNewPrivs:\t1", "CapBnd:\t0000000400000000", "CapEff:\t0000000400000000", "Seccomp:\t2"} { // bit 34 is CAP_SYSLOG
		if !slices.Contains(strings.Split(status, "\n"), want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	var writable []string
	for _, dir := range []string{"/", "/etc", "/usr", "/opt", "/var/lib", "/var/lib/kubelet", "/root", "/run", "/sys/fs/cgroup", "/var/lib/kubelet/device-plugins", "/var/lib/tandem", "/run/cdi"} {
		if _, err := m.try("nsenter", "--target", pid, "--mount", "--", "sh", "-c", "touch "+dir+"/probe && rm "+dir+"/probe"); err == nil {
			writable = append(writable, dir)
		}
	}
	if want := []string{"/var/lib/kubelet/device-plugins", "/var/lib/tandem", "/run/cdi"}; !slices.Equal(writable, want) {
		t.Errorf("the service can write in %q, want %q", writable, want)
	}
	out := m.run(t, "systemd-analyze", "security", "--no-pager", "--threshold=30", unit)
	lines := strings.Split(out, "\n")
	t.Log(lines[len(lines)-1])
}

// checkSignals reloads the service, and ends it as a crash does.
func checkSignals(t *testing.T, m *machine, kubelet *kubelettest.Kubelet) {
	pid := m.unit(t, "MainPID", unit)
	m.run(t, "systemctl", "reload", unit)
	await(t, "the agent to read its configuration again", func() error {
		if log := m.run(t, "journalctl", "--no-pager", "--unit", unit); !strings.Contains(log, "configuration reloaded") {
			return fmt.Errorf("its log is\n%s", log)
		}
		return nil
	})
	if now := m.unit(t, "MainPID", unit); now != pid {
		t.Errorf("process %s after reload, was %s", now, pid)
	}
	before := len(kubelet.Registrations())
	m.run(t, "systemctl", "kill", "--signal=KILL", unit)
	await(t, "another process to register", func() error {
		if got := len(kubelet.Registrations()); got == before {
			return fmt.Errorf("%d registrations", got)
		}
		return nil
	})
	if err := kubelet.AwaitHealthy(t.Context(), resource, 8); err != nil {
		t.Fatal(err)
	}
}

// checkFleet does what docs/install.md has for gpu-fleet on a server. Port 9410 is that of k8s-gpu here.
func checkFleet(t *testing.T, m *machine) {
	m.write(t, "/etc/gpu-fleet/gpu-fleet.yaml", "clusters: [{name: dc1, kind: nomad, address: 'http://127.0.0.1:4646'}]\nledger: {file: "+ledger+"}\nlisten: 127.0.0.1:9411\n")
	m.run(t, "gpu-fleet", "validate")
	m.run(t, "systemctl", "enable", "--now", fleet)
	m.run(t, "runuser", "-u", "gpu-fleet", "--", "gpu-fleet", "init")
	await(t, "gpu-fleet to lead", func() error {
		out, err := m.try("gpu-fleet", "status", "--json")
		if err == nil && (!strings.Contains(out, `"leads": true`) || !strings.Contains(out, "CLUSTER_UNREAD")) {
			err = fmt.Errorf("its status is %s", out)
		}
		return err
	})
	m.run(t, "systemd-analyze", "security", "--no-pager", "--threshold=20", fleet)
}

// checkUpgrade expects another process of the service, an unchanged one of Nomad with advice, and configuration files as they were edited.
func checkUpgrade(t *testing.T, m *machine, files []string) {
	m.write(t, "/etc/systemd/system/nomad.service", "[Service]\nExecStart=/bin/sleep infinity\n")
	m.run(t, "systemctl", "start", "nomad")
	m.edit(t, defaults, "# mine")
	m.edit(t, "/etc/nomad.d/nomad-gpu.hcl", "# mine")
	m.run(t, "systemctl", "start", mpsUnit)
	nomad, agent, daemons, mover := m.unit(t, "MainPID", "nomad.service"), m.unit(t, "MainPID", unit), m.unit(t, "MainPID", mpsUnit), m.unit(t, "MainPID", fleet)
	output := m.install(t, files...)
	if !strings.Contains(output, "tandem-nomad-gpu: Nomad loads this version when the client is restarted") {
		t.Errorf("no advice in\n%s", output)
	}
	if now := m.unit(t, "MainPID", "nomad.service"); now != nomad {
		t.Errorf("Nomad is process %s after the upgrade, was %s", now, nomad)
	}
	if now := m.unit(t, "MainPID", unit); now == agent || m.unit(t, "ActiveState,UnitFileState", unit) != "active\nenabled" {
		t.Errorf("process %s of %s, was %s: %s", now, unit, agent, m.unit(t, "ActiveState,UnitFileState", unit))
	}
	if now := m.unit(t, "MainPID", mpsUnit); now == daemons || m.unit(t, "ActiveState,UnitFileState", mpsUnit) != "active\ndisabled" {
		t.Errorf("process %s of %s, was %s: %s", now, mpsUnit, daemons, m.unit(t, "ActiveState,UnitFileState", mpsUnit))
	}
	if now := m.unit(t, "MainPID", fleet); now == mover || m.unit(t, "ActiveState,UnitFileState", fleet) != "active\nenabled" {
		t.Errorf("process %s of %s, was %s: %s", now, fleet, mover, m.unit(t, "ActiveState,UnitFileState", fleet))
	}
	m.checkLine(t, defaults, "# mine")
	m.checkLine(t, "/etc/nomad.d/nomad-gpu.hcl", "# mine")
	m.checkLine(t, "/etc/gpu-fleet/gpu-fleet.yaml", "listen: 127.0.0.1:9411")
	if got := m.run(t, "dpkg-query", "--show", "--showformat=${Version} ", "tandem-nomad-gpu", "tandem-k8s-gpu", "tandem-gpu-fleet"); got != "99.0.0-1 99.0.0-1 99.0.0-1" {
		t.Errorf("installed: %s", got)
	}
}

// checkRemove expects that work of Nomad, settings and history stay.
func checkRemove(t *testing.T, m *machine) {
	m.write(t, "/opt/nomad/data/client/state.db", "Nomad's")
	m.write(t, "/var/lib/tandem/nomad-gpu.json", "{}")
	m.write(t, "/var/lib/tandem/agents/nomad-gpu.json", "{}")
	output := m.run(t, "dpkg", "--remove", "tandem-nomad-gpu", "tandem-k8s-gpu", "tandem-gpu-fleet")
	if !strings.Contains(output, "the plugin that runs offers its GPUs until the client is restarted") {
		t.Errorf("no advice in\n%s", output)
	}
	for _, name := range []string{unit, mpsUnit, fleet} {
		if got := m.unit(t, "ActiveState", name); got != "inactive" {
			t.Errorf("%s is %s", name, got)
		}
	}
	m.checkExists(t, false, "/usr/bin/nomad-gpu", "/usr/bin/k8s-gpu", "/usr/bin/gpu-fleet", "/opt/nomad/data/plugins", "/lib/systemd/system/"+unit, "/lib/systemd/system/"+mpsUnit, "/usr/share/doc/tandem-k8s-gpu")
	m.checkExists(t, true, "/opt/nomad/data/client/state.db", defaults, "/etc/nomad.d/nomad-gpu.hcl", "/var/lib/tandem/k8s-gpu.json", "/var/lib/tandem/nomad-gpu.json", ledger)
}

// checkPurge expects that each package removes its own history, and the last one the folder.
func checkPurge(t *testing.T, m *machine) {
	m.run(t, "dpkg", "--purge", "tandem-k8s-gpu")
	m.checkExists(t, false, defaults, "/var/lib/tandem/k8s-gpu.json", "/var/lib/tandem/k8s-gpu.sock.lock", "/var/lib/tandem/agents/k8s-gpu.lock", enabled, "/etc/systemd/system/"+unit)
	m.checkExists(t, true, "/var/lib/tandem/nomad-gpu.json", "/var/lib/tandem/agents/nomad-gpu.json")
	m.checkExists(t, true, "/etc/gpu-fleet/gpu-fleet.yaml")
	m.run(t, "dpkg", "--purge", "tandem-nomad-gpu", "tandem-gpu-fleet")
	m.checkExists(t, false, "/etc/nomad.d", "/var/lib/tandem", "/etc/gpu-fleet", "/var/lib/gpu-fleet")
	m.checkExists(t, true, "/opt/nomad/data/client/state.db")
	left, err := filepath.Glob(m.at("/var/lib/systemd/deb-systemd-helper-*/*-gpu*"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}
