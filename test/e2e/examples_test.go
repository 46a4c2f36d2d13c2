//go:build e2e

package e2e

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
)

// deployed is the folder of what is shipped for Nomad.
const deployed = "../../deploy/nomad"

// example is a job of that folder, and what its tasks get on a machine with three whole GPUs, one in four shares, and MIG instances.
type example struct {
	name    string
	allocs  int
	devices int    // of each allocation
	named   int    // of these in NVIDIA_VISIBLE_DEVICES
	prefix  string // of each device's ID
}

// TestNomadExamples validates every job of deploy/nomad with Nomad, and runs those whose driver the sandbox has, with a stand-in for nvidia-smi.
func TestNomadExamples(t *testing.T) {
	m := install(t, "a100-mig")
	policy := write(t, "examples.yaml", []byte("version: v1\npolicy:\n  rules:\n    - {select: {index: 3}, use: time-slicing, replicas: 4}\n"))
	smi := write(t, "bin/nvidia-smi", []byte("#!/bin/sh\necho \"GPUs: $NVIDIA_VISIBLE_DEVICES\"\ncd /dev\necho nvidia*\n"))
	if err := os.Chmod(smi, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", filepath.Dir(smi)+":"+os.Getenv("PATH")) // for raw_exec
	chroot := write(t, "chroot.hcl", []byte(fmt.Sprintf("client {\n  chroot_env = {\n    %q = %q\n    %q = %q\n  }\n}\n",
		"/bin/busybox", "/bin/sh", smi, "/usr/bin/nvidia-smi")))
	nomad := launchClient(t, "nomad", onMachine(m, "nomad-history", `policy_file = "`+policy+`"`), chroot)
	nomad.awaitReady(t)
	step(t, "the client's files", func(t *testing.T) { checkFragment(t) })
	step(t, "every job is valid", func(t *testing.T) {
		must(t, "nomad", "fmt", "-check", deployed)
		files, err := filepath.Glob(deployed + "/*.nomad.hcl")
		if err != nil || len(files) < 12 {
			t.Fatalf("%d jobs, %v", len(files), err)
		}
		for _, file := range files {
			argv := []string{"nomad", "job", "validate", "-address=" + nomadAPI}
			sum := strings.Repeat("0", 64)
			if strings.HasSuffix(file, "/install.nomad.hcl") {
				argv = append(argv, "-var=version=2.0.0", fmt.Sprintf(`-var=sha256={"amd64": %q, "arm64": %q}`, sum, sum))
			}
			if out := must(t, append(argv, file)...); !strings.Contains(out, "Job validation successful") {
				t.Errorf("%s: %s", file, out)
			}
		}
	})
	step(t, "jobs run", func(t *testing.T) {
		examples := []example{
			{"exclusive", 1, 1, 1, ""}, // a GPU or an instance
			{"several", 1, 2, 2, ""},
			{"shared", 1, 1, 1, "GPU-"},
			{"mig", 1, 1, 1, "MIG-"},
			{"constraint", 1, 1, 1, "GPU-"},
			{"affinity", 1, 1, 1, ""},
			{"spread", 2, 1, 1, ""},
			{"blocks", 1, 2, 1, ""},
			{"raw-exec", 1, 1, 1, ""},
		}
		for _, e := range examples {
			must(t, "nomad", "job", "run", "-address="+nomadAPI, "-detach", filepath.Join(deployed, e.name+".nomad.hcl"))
		}
		for _, e := range examples {
			nomad.checkExample(t, e)
		}
	})
	checkDriver(t, m)
}

// checkFragment validates the shipped fragment beside the configuration of HashiCorp's package.
func checkFragment(t *testing.T) {
	fragment, err := os.ReadFile(deployed + "/nomad-gpu.hcl")
	if err != nil {
		t.Fatal(err)
	}
	write(t, "etc/nomad.d/nomad-gpu.hcl", fragment)
	nomad := write(t, "etc/nomad.d/nomad.hcl", []byte("data_dir = \"/opt/nomad/data\"\nbind_addr = \"0.0.0.0\"\nclient {\n  enabled = true\n  servers = [\"127.0.0.1\"]\n}\n"))
	if out := must(t, "nomad", "config", "validate", filepath.Dir(nomad)); !strings.Contains(out, "Configuration is valid!") {
		t.Error(out)
	}
}

var gpuNode = regexp.MustCompile(`\bnvidia[0-9]+\b`)

// checkExample waits until the job's tasks are done, and compares the devices that Nomad chose with what the tasks printed.
func (a *agent) checkExample(t *testing.T, e example) {
	t.Helper()
	var allocs []allocation
	await(t, "job "+e.name+" to complete", 60*time.Second, func() error {
		if err := a.get("/v1/job/"+e.name+"/allocations", &allocs); err != nil {
			return err
		}
		done := func(alloc allocation) bool { return alloc.ClientStatus == "complete" }
		if len(allocs) != e.allocs || !slices.ContainsFunc(allocs, done) || slices.ContainsFunc(allocs, func(alloc allocation) bool { return !done(alloc) }) {
			return fmt.Errorf("its allocations are %+v", allocs)
		}
		return nil
	})
	for _, listed := range allocs {
		var alloc allocation
		if err := a.get("/v1/allocation/"+listed.ID, &alloc); err != nil {
			t.Fatal(err)
		}
		ids := alloc.devices()
		var output string
		await(t, "the log of job "+e.name, 30*time.Second, func() (err error) {
			if output, err = alloc.log("gpus", "stdout"); err == nil && !strings.Contains(output, "nvidia") {
				err = errors.New("it is not complete: " + output)
			}
			return err
		})
		t.Logf("%s has %q and prints %q", e.name, ids, output)
		named, instances := 0, 0
		for _, id := range ids {
			if !strings.HasPrefix(id, e.prefix) {
				t.Errorf("job %s has %s, want %s...", e.name, id, e.prefix)
			}
			if strings.Contains(output, deviceOf(id)) {
				named++
			}
			if strings.HasPrefix(id, "MIG-") {
				instances++
			}
		}
		if len(ids) != e.devices || named != e.named {
			t.Errorf("job %s has %q and prints %q; want %d devices, %d of them named", e.name, ids, output, e.devices, e.named)
		}
		// Two instances may be of one GPU; raw_exec sees the machine's /dev.
		if nodes := gpuNode.FindAllString(output, -1); e.name != "raw-exec" && instances < 2 && len(nodes) != len(ids) {
			t.Errorf("job %s has %q and sees the nodes %q", e.name, ids, nodes)
		}
	}
	a.remove(t, e.name)
}
