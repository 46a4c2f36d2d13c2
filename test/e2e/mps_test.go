//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/node/mps"
	"github.com/tandem-gpu/tandem/test/mpscontrol"
)

// mpsRoot is where the MPS control daemons have their folders.
func mpsRoot() string { return filepath.Join(stateDir(), "mps") }

// mpsPrograms is the folder with the stand-in for the programs of the driver.
func mpsPrograms() string { return filepath.Join(stateDir(), "programs") }

// mpsPipe is the pipe directory of the pool of the policy "shared".
func mpsPipe() string { return mps.Pipe(mpsRoot(), "gpu.mps") }

// mpsServes returns why no daemon serves its control file.
func mpsServes() error {
	_, err := mps.FindControl(mpsPipe())
	return err
}

const mpsJob = "mps-daemon" // of deploy/nomad

// installMPS installs the stand-in for the programs of the driver, on the PATH of Nomad's tasks, too.
func installMPS(t *testing.T) {
	t.Helper()
	program, err := os.ReadFile(os.Getenv("E2E_MPS_CONTROL"))
	if err != nil {
		t.Fatal(err)
	}
	path := write(t, "programs/mpscontrol", program)
	if err := errors.Join(os.Chmod(path, 0o755), mpscontrol.Install(mpsPrograms(), "mpscontrol")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", mpsPrograms()+":"+os.Getenv("PATH"))
}

// failMPS makes each start of a daemon fail, until recoverMPS.
func failMPS(t *testing.T, why string) {
	t.Helper()
	write(t, "programs/"+mpscontrol.FailFile, []byte(why+"\n"))
}

func recoverMPS(t *testing.T) {
	t.Helper()
	if err := os.Remove(filepath.Join(mpsPrograms(), mpscontrol.FailFile)); err != nil {
		t.Fatal(err)
	}
}

// mps has a daemon of Kubernetes that could not start at first, its clients, and its end and restart.
func (p *policied) mps(t *testing.T) {
	p.awaitDaemonLog(t, "Kubernetes' pod to log why it starts none", p.kubeDaemonLog, "no CUDA-capable device")
	p.nomad.submit(t, "../"+deployed+"/mps-daemon.nomad.hcl", "program="+binary("nomad-gpu"),
		fmt.Sprintf("args=[%q, %q]", "--state-dir="+filepath.Join(stateDir(), sharedHistory), "--mps-root="+mpsRoot()))
	p.awaitDaemonLog(t, "Nomad's task to wait", p.nomadDaemonLog, "another mps-daemon of this node runs the daemons")
	recoverMPS(t)
	p.awaitOffers(t, p.units(12, 4)...)
	p.checkLimits(t, 1)
	checkShm(t)
	p.kube.request(t, "client", "nvidia.com/gpu.mps", 1)
	ids, _ := p.nomad.runJob(t, "client", "complete", "device=nvidia/gpu-mps", "count=1",
		"then=echo at $CUDA_MPS_PIPE_DIRECTORY, at most $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
	alloc, err := p.nomad.allocation("client")
	if err != nil {
		t.Fatal(err)
	}
	output := strings.TrimSpace(awaitOutput(t, alloc, "gpus", "\nat "))
	limit := fmt.Sprintf("0=%dM", 30<<10)
	want := fmt.Sprintf("%s\nat %s, at most %s", deviceOf(ids[0]), mpsPipe(), limit)
	if !strings.HasSuffix(output, want) {
		t.Errorf("a job that is a client of MPS prints %q, want %q", output, want)
	}
	p.pod, output = p.kube.awaitWork(t, "client", 1)
	want = fmt.Sprintf("%s, MPS: /mps/nvidia.com/gpu.mps/pipe there %s", deviceOf(p.pod.ids()[0]), limit)
	if !strings.Contains(output, want) {
		t.Errorf("a pod that is a client of MPS prints %q, want %q", output, want)
	}
	failMPS(t, "out of memory")
	if err := mpscontrol.Kill(mpsPipe()); err != nil {
		t.Fatal(err)
	}
	p.awaitOffers(t, p.units(12, 0)...)
	recoverMPS(t)
	p.awaitOffers(t, p.units(12, 4)...)
	p.checkLimits(t, 2)
	p.kube.awaitUnchanged(t, "client", p.pod)
}

// otherMPS has Kubernetes run no daemons any more. Nomad's task takes its place.
func (p *policied) otherMPS(t *testing.T) {
	must(t, "kubectl", "delete", "--namespace=kube-system", "daemonset/tandem-k8s-gpu-mps-daemon", "--cascade=foreground", "--timeout=50s")
	await(t, "a daemon of Nomad", 60*time.Second, func() error { return daemonStarts(3) })
	p.awaitOffers(t, p.units(12, 4)...)
	p.checkLimits(t, 3)
	client, err := mpscontrol.Connect(mpsPipe())
	if err != nil {
		t.Fatal(err)
	}
	p.client = client
	p.top.Cleanup(func() { _ = client.Close() })
}

// awaitDaemonEnds expects the daemon of a pool that the policy has no more to end with its last client.
func (p *policied) awaitDaemonEnds(t *testing.T) {
	t.Helper()
	p.awaitDaemonLog(t, "the daemon to wait for its client", p.nomadDaemonLog, "its clients have not ended: 1")
	if err := errors.Join(mpsServes(), p.client.Close()); err != nil {
		t.Fatal(err)
	}
	await(t, "the end of the daemon, and the compute mode of its GPUs", 30*time.Second, func() error {
		modes, err := os.ReadFile(filepath.Join(mpsPrograms(), mpscontrol.ModesFile))
		if mpsServes() == nil || !strings.HasSuffix(string(modes), strings.Join(p.uuids(5, 6), ",")+" DEFAULT\n") {
			err = fmt.Errorf("it runs, or they are %q", modes)
		}
		return err
	})
}

// awaitDaemonLog waits until one of the commands mps-daemon has logged a text.
func (p *policied) awaitDaemonLog(t *testing.T, what string, log func() (string, error), text string) {
	t.Helper()
	await(t, what, 60*time.Second, func() error {
		all, err := log()
		if err == nil && !strings.Contains(all, text) {
			err = fmt.Errorf("no %q in\n%s", text, all)
		}
		return err
	})
}

func (p *policied) nomadDaemonLog() (string, error) {
	alloc, err := p.nomad.allocation(mpsJob)
	if err != nil {
		return "", err
	}
	return alloc.log("daemons", "stderr")
}

func (p *policied) kubeDaemonLog() (string, error) {
	files, err := filepath.Glob(logDir() + "/pods/kube-system_*/mps-daemon/*.log")
	if err != nil || len(files) != 1 {
		return "", fmt.Errorf("its logs are %q, error %w", files, err)
	}
	text, err := os.ReadFile(files[0])
	return string(text), err
}

// checkLimits expects the daemon of the pool to have been started so often, the last time with the limits of the policy, before any client.
func (p *policied) checkLimits(t *testing.T, starts int) {
	t.Helper()
	want := "Starting control daemon for " + strings.Join(p.uuids(5, 6), ",") + "\n"
	for i, id := range p.uuids(5, 6) {
		want += fmt.Sprintf("Cmd:set_default_device_pinned_mem_limit %[1]d %[3]dM\nCmd:set_default_device_pinned_mem_limit %[2]s %[3]dM\n", i, id, 30<<10)
	}
	want += "Cmd:set_default_active_thread_percentage 50\n"
	await(t, "the limits of the daemon", 30*time.Second, func() error { // one that has just begun gets them in a moment: the units may be healthy still, by the one before
		all := mpsLog()
		last := all[max(0, strings.LastIndex(all, "Starting control daemon")):]
		if err := daemonStarts(starts); err != nil || strings.HasPrefix(last, want) {
			return err
		}
		return fmt.Errorf("it was started with\n%swant\n%s", last, want)
	})
}

func mpsLog() string {
	text, _ := os.ReadFile(filepath.Join(filepath.Dir(mpsPipe()), "log", "control.log")) // there is none before the first start
	return string(text)
}

// daemonStarts reports that a daemon was not started so often.
func daemonStarts(want int) error {
	if n := strings.Count(mpsLog(), "Starting control daemon"); n != want {
		return fmt.Errorf("a daemon was started %d times, want %d:\n%s", n, want, mpsLog())
	}
	return nil
}

// checkShm expects pods to have the /dev/shm of the node, as Nomad's tasks have.
func checkShm(t *testing.T) {
	t.Helper()
	var node, pods syscall.Stat_t
	if err := errors.Join(syscall.Stat("/dev/shm", &node), syscall.Stat(filepath.Join(mpsRoot(), "shm"), &pods)); err != nil || node.Dev != pods.Dev {
		t.Errorf("pods have another /dev/shm than the node (%d, %d), error %v", pods.Dev, node.Dev, err)
	}
}
