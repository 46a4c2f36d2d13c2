package shadow

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/binaries"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

const gpus = "nvidia.com/gpu"

// beside is a machine with a kubelet's pod-resources API, in a folder of its own.
type beside struct {
	*testing.T
	*simdriver.Machine
	kubelet *kubelettest.PodResources
	socket  string
	uuids   []string
}

func startBeside(t *testing.T, machine string) *beside {
	t.Helper()
	b := &beside{T: t, Machine: simdriver.Start(t, machine), socket: filepath.Join(coretest.ShortDir(t), "kubelet.sock")}
	var err error
	b.kubelet, err = kubelettest.ServePodResources(b.socket)
	must(t, err)
	t.Cleanup(b.kubelet.Close)
	slots, err := b.Slots()
	must(t, err)
	for _, slot := range slots {
		b.uuids = append(b.uuids, b.UUID(slot))
	}
	return b
}

// offerAll has the other plugin offer every GPU as it is.
func (b *beside) offerAll() {
	b.Helper()
	for slot, id := range b.uuids {
		numa, err := b.Get(slot, "numa")
		must(b.T, err)
		n, err := strconv.ParseInt(numa, 10, 64)
		must(b.T, err)
		b.kubelet.Offer(gpus, n, id)
	}
}

func (b *beside) command(args ...string) *exec.Cmd {
	return command(b.T, "k8s-gpu", append([]string{
		"shadow", "--pod-resources-socket", b.socket, "--driver-root", b.Root, "--driver-root-ctr-path", b.Root, "--dev-root", b.Root,
		"--sysfs-root", b.Root + "/sys", "--procfs-root", b.Root + "/proc", "--kernel-log=off",
	}, args...)...)
}

func command(t *testing.T, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), binaries.Path(t, program), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	return cmd
}

// report runs shadow once and returns its report; the exit code fits it.
func report(t *testing.T, cmd *exec.Cmd) shadow.Report {
	t.Helper()
	cmd.Args = append(cmd.Args, "--json")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var r shadow.Report
	if jsonErr := json.Unmarshal(out.Bytes(), &r); jsonErr != nil {
		t.Fatalf("%v, %v: %s%s", err, jsonErr, out.String(), errs.String())
	}
	want := 3
	if r.Same {
		want = 0
	}
	if code := cmd.ProcessState.ExitCode(); code != want || r.Same != (len(r.Differences) == 0) {
		t.Errorf("exit code %d, %d differences\n%s", code, len(r.Differences), errs.String())
	}
	return r
}

// render is a report as text, with short UUIDs.
func render(r shadow.Report) string {
	r.Other = "the other side"
	text := r.String()
	text = regexp.MustCompile(`-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`).ReplaceAllString(text, "")
	return regexp.MustCompile(`since [0-9T:.Z-]+`).ReplaceAllString(text, "since TIME")
}

// process makes a process of a container of a pod, as procfs shows it.
func (b *beside) process(pid int, pod, container string, env ...string) {
	b.Helper()
	dir := filepath.Join(b.Root, "proc", fmt.Sprint(pid))
	must(b.T, os.MkdirAll(dir, 0o755))
	environ := strings.Join(append([]string{"PATH=/bin", "HOSTNAME=" + pod}, env...), "\x00") + "\x00"
	for name, text := range map[string]string{
		"cgroup": "0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + container + ".scope\n", "environ": environ,
	} {
		must(b.T, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
}

// Beside a plugin that offers what this agent would offer, there is no difference; beside one that offers sick, unknown and misplaced
// devices, and has given others than this agent would, each is reported.
func TestKubernetes(t *testing.T) {
	b := startBeside(t, "h100x8")
	b.offerAll()
	b.kubelet.Hold("default/train", gpus, b.uuids[0], b.uuids[1])
	b.process(4001, "train", "a", "NVIDIA_VISIBLE_DEVICES="+b.uuids[1]+","+b.uuids[0])
	b.kubelet.Hold("default/hidden", gpus, b.uuids[4])
	b.kubelet.Hold("default/other", "example.com/fpga", "fpga0")
	if r := report(t, b.command()); !r.Same || r.Here != 8 || r.There != 8 || len(r.NotCompared) != 1 || !strings.Contains(r.NotCompared[0], "default/hidden main") {
		t.Errorf("%s", render(r))
	}

	must(t, b.Fail(simdriver.GPU(5), "*", "GPU_IS_LOST", simdriver.Always))
	must(t, b.Lose(3))
	b.kubelet.Offer(gpus, 0, "GPU-of-another-host")
	b.kubelet.Offer("nvidia.com/gpu.shared", 0, b.uuids[0]+"::0")
	b.kubelet.Offer("example.com/fpga", 0, "fpga0")
	b.kubelet.Hold("default/index", gpus, b.uuids[6])
	b.process(4002, "index", "b", "NVIDIA_VISIBLE_DEVICES=6", "NVIDIA_GDS=enabled")
	b.kubelet.Hold("default/cdi", gpus, b.uuids[7])
	b.process(4003, "cdi", "c", "NVIDIA_VISIBLE_DEVICES=void")
	b.kubelet.Hold("default/gone", gpus, "GPU-gone")
	goldenfile.Compare(t, "testdata/kubernetes.golden", render(report(t, b.command())))
}

var must = check.NoError

// With --for, what begins and ends is printed as it happens, and the exit code shows that there was a difference.
func TestFollow(t *testing.T) {
	b := startBeside(t, "h100x8")
	b.offerAll()
	cmd := b.command("--for", "12s", "--json")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	lines := json.NewDecoder(out)
	var first shadow.Report
	if must(t, lines.Decode(&first)); !first.Same {
		t.Fatalf("%s", render(first))
	}
	must(t, b.XID(2, 79))
	var change struct{ Begun, Ended []shadow.Difference }
	must(t, lines.Decode(&change))
	if len(change.Begun) != 1 || change.Begun[0].Kind != shadow.KindHealth || change.Begun[0].Device != b.uuids[2] || !strings.Contains(change.Begun[0].Here, "XID 79") {
		t.Errorf("%+v", change)
	}
	if exit := (*exec.ExitError)(nil); !errors.As(cmd.Wait(), &exit) || exit.ExitCode() != 3 {
		t.Errorf("exit code %v", exit)
	}
}

// shadow leaves no trace: no file of the host is new or changed, in the folders that an agent writes to.
func TestNothingIsWritten(t *testing.T) {
	b := startBeside(t, "h100x8")
	b.offerAll()
	host := t.TempDir()
	for _, folder := range []string{"state", "cdi", "jobs", "plugins"} {
		must(t, os.MkdirAll(filepath.Join(host, folder), 0o755))
	}
	before := tree(t, host)
	args := []string{
		"--state-dir", host + "/state", "--cdi-dir", host + "/cdi", "--hpc-job-mapping-dir", host + "/jobs", "--kubelet-socket", host + "/plugins/kubelet.sock",
		"--device-list-strategy=auto", "--features-file", host + "/features",
	}
	if r := report(t, b.command(append(args, "--for", "3s")...)); r.There != 8 {
		t.Errorf("%s", render(r))
	}
	if after := tree(t, host); !slices.Equal(before, after) {
		t.Errorf("%q, was %q", after, before)
	}
}

// tree lists the files of a folder with their times.
func tree(t *testing.T, root string) (files []string) {
	t.Helper()
	must(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			files = append(files, path+" "+info.ModTime().Format(time.RFC3339Nano))
		}
		return err
	}))
	return files
}
