package agents

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
	"github.com/tandem-gpu/tandem/test/rig"
)

const sharedByMPS = header + `policy:
  rules:
    - {select: {index: [%s]}, use: mps, replicas: 2, memory: 30GiB}
`

// startDaemons starts the verb mps-daemon beside an agent, with a stand-in for the programs of the driver. stop ends it as its orchestrator does.
func (a *agent) startDaemons(root string) (process *os.Process, stop func()) {
	a.Helper()
	programs := filepath.Join(a.dir, "programs")
	self, err := os.Executable()
	a.must(err)
	if _, err := os.Stat(programs); err != nil {
		a.must(mpscontrol.Install(programs, self))
	}
	log, err := os.Create(filepath.Join(a.dir, "mps-daemon.log"))
	a.must(err)
	cmd := exec.Command(a.binary, append(rig.Flags(map[string]any{"state_dir": a.state, "mps_root": root}), "mps-daemon")...)
	cmd.Env, cmd.Stderr = append(os.Environ(), "PATH="+programs), log
	a.must(cmd.Start())
	stop = func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		if err := cmd.Wait(); err != nil {
			text, _ := os.ReadFile(log.Name())
			a.Errorf("mps-daemon: %v\n%s", err, text)
		}
		a.must(log.Close())
	}
	a.Cleanup(func() {
		if cmd.ProcessState == nil {
			stop()
		}
	})
	return cmd.Process, stop
}

// The daemons follow the agent: a pool has one while the policy shares GPUs by MPS, and as long as it has clients.
func TestMPSDaemons(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		root := filepath.Join(a.dir, "mps")
		a.settings["mps_root"] = root
		a.useFile(fmt.Sprintf(sharedByMPS, "5, 6"))
		a.start()
		a.healthy(10, 6)
		daemons, stop := a.startDaemons(root)
		a.healthy(10, 10)
		pipe := mps.Pipe(root, "gpu.mps")
		settings := func() string {
			text, err := os.ReadFile(filepath.Join(root, "nvidia.com", "gpu.mps", "log", "control.log"))
			a.must(err)
			return string(text)
		}
		if log := settings(); strings.Count(log, " 30720M") != 4 || !strings.Contains(log, "set_default_active_thread_percentage 50") {
			a.Errorf("the daemon takes clients without limits:\n%s", log)
		}
		a.must(mpscontrol.Kill(pipe))
		a.await("another daemon", func() bool { return strings.Count(settings(), "percentage 50") == 2 })
		a.healthy(10, 10)

		client, err := mpscontrol.Connect(pipe)
		a.must(err)
		a.useFile(fmt.Sprintf(sharedByMPS, "6"))
		a.must(daemons.Signal(syscall.SIGHUP)) // as "pkill -HUP" does: both have the same name
		a.signal(syscall.SIGHUP)
		a.healthy(9, 7) // the daemon has a client, and takes no more
		stop()
		a.healthy(9, 7)
		_, stop = a.startDaemons(root)
		a.must(client.Close())
		only := a.driver.UUID(6)
		a.await("a daemon for one GPU", func() bool { return strings.Contains(settings(), "control daemon for "+only+"\n") })
		a.healthy(9, 9)
		stop()
		a.healthy(9, 7)
		check.Until(t, "the end of the daemon", func() bool { return mpscontrol.Kill(pipe) != nil })
	})
}

// sharesWithServer starts nomad-gpu with two GPUs that are shared by MPS, and mps-daemon, whose daemon has a client, and so a server on both GPUs. The
// process of the server is that of the daemon here. prove has the GPUs proved, by a command that fails while the pool has a daemon.
func sharesWithServer(t *testing.T) (a *agent, daemon int, client io.Closer, prove func()) {
	t.Helper()
	_, address := startNomadAPI(t)
	a = newAgent(t, nomadGPU, "h100x8", map[string]any{"nomad_address": address})
	root := filepath.Join(a.dir, "mps")
	a.settings["mps_root"] = root
	rules := fmt.Sprintf(sharedByMPS, "5, 6") + "    - {select: {index: [0, 1, 2, 3, 4, 7]}, use: reserved}\n"
	a.useFile(rules)
	a.start()
	a.startDaemons(root)
	a.healthy(4, 4)
	pipe := mps.Pipe(root, "gpu.mps")
	client, err := mpscontrol.Connect(pipe)
	a.must(err)
	text, err := os.ReadFile(filepath.Join(pipe, mpscontrol.PIDFile))
	a.must(err)
	daemon, err = strconv.Atoi(strings.TrimSpace(string(text)))
	a.must(err, a.driver.UseProcess(5, daemon, 100), a.driver.UseProcess(6, daemon, 100))
	a.await("the server on both GPUs", func() bool {
		all := a.report().Devices
		return len(all) > 0 && !slices.ContainsFunc(all, func(d report.Device) bool {
			return !slices.ContainsFunc(d.Processes, func(p report.Process) bool { return p.PID == daemon })
		})
	})
	return a, daemon, client, func() {
		a.Helper()
		command := "[ -e " + mps.RecordPath(a.state, "gpu.mps") + " ] && exit 1; exit 0"
		a.useFile(rules + fmt.Sprintf("prove: {command: [/bin/sh, -c, %q], at: [boot], unproved: withhold, maxPerNode: 2, timeout: 5s}\n", command))
		a.signal(syscall.SIGHUP)
	}
}

// awaitProofs waits until it holds for the proofs of all GPUs.
func (a *agent) awaitProofs(what string, holds func(report.Proof) bool) {
	a.Helper()
	check.Within(a.T, 4*time.Minute, what, func() bool {
		all := a.report().Proofs
		return len(all) > 0 && !slices.ContainsFunc(all, func(p report.Proof) bool { return !holds(p) })
	})
}

// A GPU that is shared by MPS is proved, although the server of its pool's daemon, which has no client, is on it: the daemon ends for the proof, and
// another one is started after it. The GPU takes no work before the proof.
func TestProofOfAGPUSharedByMPS(t *testing.T) {
	t.Parallel()
	a, was, client, prove := sharesWithServer(t)
	a.must(client.Close())
	prove()
	a.awaitProofs("both GPUs to be proved", func(p report.Proof) bool { return p.Result == "passed" })
	a.await("another daemon", func() bool {
		text, _ := os.ReadFile(mps.RecordPath(a.state, "gpu.mps"))
		return strings.Contains(string(text), `"ready"`) && !strings.Contains(string(text), strconv.Itoa(was))
	})
	a.healthy(4, 4)
}

// A client that no record shows keeps the daemon. Then the proof could not run, and its GPU takes work.
func TestProofBesideAClientOfMPS(t *testing.T) {
	t.Parallel()
	a, _, client, prove := sharesWithServer(t)
	prove()
	a.awaitProofs("no proof to run", func(p report.Proof) bool { return p.CouldNotRun > 0 })
	a.healthy(4, 4)
	a.prints("PROOF_COULD_NOT_RUN", "inspect", "--json")
	a.prints("the MPS control daemon of pool gpu.mps has not ended for GPU", "inspect", "--json")
	a.must(client.Close())
}
