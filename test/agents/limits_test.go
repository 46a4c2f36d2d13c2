package agents

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// fence 21: the driver of a node is replaced by one with limits and again by one without, and a pool with a required limit follows: its cause names the version that is
// missing, and with limits in the driver it is another one, or none. Whether work is taken then depends on the kernel: node/limits and test/e2e/limits have that.
func TestLimitsFollowTheDriver(t *testing.T) {
	t.Parallel()
	const policy = header + `memoryLimits: {experimental: true}
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 2, memory: 20GiB, limit: required}
`
	text, err := simdriver.Text("h100x8")
	check.NoError(t, err)
	for _, program := range programs {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			mount := filepath.Join(t.TempDir(), "cgroup")
			machine, err := simdriver.WithLimits(text, simdriver.Misc, mount, "driver = 595.71.05")
			check.NoError(t, err)
			file := filepath.Join(t.TempDir(), "machine.conf")
			check.NoError(t, os.Mkdir(mount, 0o755), os.WriteFile(file, []byte(machine), 0o600))
			a := newAgent(t, program, file, map[string]any{"cgroup_root": mount})
			a.useFile(policy)
			cause := func() string {
				for _, d := range a.report().Devices {
					if d.MemoryLimit == "required" {
						return d.Health
					}
				}
				return ""
			}
			without := func() bool { return strings.Contains(cause(), "driver 595.71.05: want 615 or newer") }
			a.start()
			a.answers()
			a.await("the version in the cause", without)
			replace := func(version string) { // the orchestrator starts the agent again, as its library is in use
				a.prints("driver released", "quiesce")
				a.must(a.driver.TryUnload(), a.driver.SetDriver(version), a.driver.Load())
				_, _ = a.command("resume")
				a.awaitExit()
				a.start()
				a.answers()
			}
			replace("615.71.09")
			a.await("another cause", func() bool { return strings.Contains(cause(), "no control groups of version 2") })
			replace("595.71.05")
			a.await("the version in the cause", without)
		})
	}
}
