package hooks

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	mib      = 1 << 20
	variable = "NVIDIA_GPU_MEMORY_LIMIT="
	request  = "NVIDIA_GPU_MEMORY_REQUEST="
	none     = 1<<64 - 1 // gpu.NoMemoryLimit
)

// gpuOf is the CDI name by which a container gets a GPU, and limitOf that by which it gets a limit.
func gpuOf(name string) string     { return vendor + "/gpu=" + name }
func limitOf(mebibytes int) string { return vendor + "/memory-limit=" + strconv.Itoa(mebibytes) }

// The container's own group has exactly the limit of its CDI names on each of its GPUs before the container's first process runs its program, and no other group
// has one: fence 2, 4.
func TestLimit(t *testing.T) {
	n := newNode(t)
	first, second := n.UUID(0), n.UUID(1)
	equal := limit{20480 * mib, 20480 * mib}
	for name, c := range map[string]struct {
		env   []string
		names []string
		want  map[string]limit // by GPU
	}{
		"a GPU":             {names: []string{gpuOf(first), limitOf(20480)}, want: map[string]limit{first: equal}},
		"a GPU's index":     {names: []string{gpuOf("1"), limitOf(20480)}, want: map[string]limit{second: equal}},
		"two GPUs":          {names: []string{gpuOf(first), gpuOf(second), limitOf(20480)}, want: map[string]limit{first: equal, second: equal}},
		"no limit":          {names: []string{gpuOf(first)}},
		"limit alone":       {names: []string{gpuOf(first)}, env: []string{variable + "100"}, want: map[string]limit{first: {100 * mib, 100 * mib}}},
		"nothing reserved":  {names: []string{gpuOf(first)}, env: []string{variable + "100", request + "0"}, want: map[string]limit{first: {0, 100 * mib}}},
		"reservation alone": {names: []string{gpuOf(first)}, env: []string{request + "100"}, want: map[string]limit{first: {100 * mib, none}}},
		"plural":            {names: []string{gpuOf(first)}, env: []string{"NVIDIA_GPU_MEMORY_LIMITS=100"}},
	} {
		t.Run(name, func(t *testing.T) {
			before := n.limits(t)
			got := n.runc(t, c.env, c.names...)
			if got.err != "" {
				t.Fatal(got.err)
			}
			want := before
			for id, l := range c.want {
				want[entry{got.group, id}] = l
			}
			if got := n.limits(t); !maps.Equal(got, want) {
				t.Errorf("the driver has %v, want %v", got, want)
			}
		})
	}
}

// Allocate's answer has CDI names alone, by which the container gets the policy's limit, and no variable: fence 29. With a second share of the GPU it is twice as
// much, in one variable: fence 7.
func TestAllocate(t *testing.T) {
	n := newNode(t)
	for want, c := range map[uint64]struct {
		resource string
		ids      []string
	}{
		20480: {resource, []string{n.UUID(0) + "::0"}}, 40960: {resource, []string{n.UUID(1) + "::0", n.UUID(1) + "::2"}}, 10240: {small, []string{n.UUID(7) + "::1"}},
	} {
		ids := c.ids
		answer, err := n.Kubelet.Allocate(t.Context(), c.resource, ids...)
		must(t, err)
		if len(answer.GetEnvs()) > 0 {
			t.Errorf("%q: variables %v", ids, answer.GetEnvs())
		}
		var names []string
		for _, d := range answer.GetCdiDevices() {
			names = append(names, d.GetName())
		}
		c := n.runc(t, nil, names...)
		id, _, _ := strings.Cut(ids[0], "::")
		if l := n.limits(t)[entry{c.group, id}]; c.err != "" || l != (limit{want * mib, want * mib}) {
			t.Errorf("%q: %q: %s, the driver has %v, want %d MiB", ids, names, c.err, l, want)
		}
	}
}

// A container whose limit can't be set does not start, and its error has the hook's text: fence 5. The text has no version.
func TestLimitCannotBeSet(t *testing.T) {
	const call = "nvmlDeviceSetMemoryLimits_v1"
	for name, c := range map[string]struct {
		cause func(*node) error
		want  string
	}{
		"NOT_SUPPORTED": {
			func(n *node) error { return n.Fail(simdriver.GPU(0), call, "NOT_SUPPORTED", simdriver.Always) },
			`exit status 1, stdout: , stderr: .*failed to set memory limits for gpu "UUID": Not Supported`,
		},
		"a driver before 615": {
			func(n *node) error { return n.Without(call) },
			`exit status 127, stdout: , stderr: .*undefined symbol: ` + call,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			must(t, c.cause(n))
			got := n.runc(t, nil, gpuOf(n.UUID(0)), limitOf(20480))
			if want := strings.ReplaceAll(c.want, "UUID", n.UUID(0)); !matches(want, got.err) {
				t.Errorf("%q, want %s", got.err, want)
			}
			if all := n.limits(t); len(all) > 0 {
				t.Errorf("the driver has %v", all)
			}
			if got := n.runc(t, nil, gpuOf(n.UUID(0))); got.err != "" {
				t.Errorf("without a limit: %s", got.err)
			}
		})
	}
}

// A program of before 1.18 ends a container at the hook, and a later one of before 1.20.1 starts it without the limit, if the program is replaced before the
// specification is: fence 3, 12. The agent writes no such hook then.
func TestOlderPrograms(t *testing.T) {
	n := newNode(t)
	n.freeze(t)
	for version, want := range map[string]string{
		"v1.17.8": `exit status 3, .*No help topic for 'apply-cuda-memory-limits'`, "v1.18.2": "^$", "v1.19.1": "^$", "v1.20.0": "^$",
	} {
		n.install(t, version)
		if c := n.runc(t, nil, gpuOf(n.UUID(0)), limitOf(20480)); !matches(want, c.err) {
			t.Errorf("%s: %q, want %s", version, c.err, want)
		}
		if all := n.limits(t); len(all) > 0 {
			t.Errorf("%s: the driver has %v", version, all)
		}
	}
	n.install(t, current) // the same specification
	c := n.runc(t, nil, gpuOf(n.UUID(0)), limitOf(20480))
	if want := (map[entry]limit{{c.group, n.UUID(0)}: {20480 * mib, 20480 * mib}}); c.err != "" || !maps.Equal(n.limits(t), want) {
		t.Errorf("%s: %q, the driver has %v, want %v", current, c.err, n.limits(t), want)
	}
}

// What the hook takes for a number of MiB, and what it refuses before it asks the driver: fence 22.
func TestValues(t *testing.T) {
	n := newNode(t)
	for value, want := range map[string]uint64{"1": 1, "20480": 20480, "0020": 20, "0": 0} {
		group, out, err := n.call(t, variable+value)
		if got := n.limits(t)[entry{group, n.UUID(0)}]; err != nil || got != (limit{want * mib, want * mib}) {
			t.Errorf("%q: %v %v: %s", value, got, err, out)
		}
	}
	const most = 1<<44 - 1
	for _, c := range []struct{ env, want string }{
		{variable + strconv.Itoa(most), "Invalid Argument"}, // the driver's answer: more than the GPU has
		{variable + strconv.Itoa(most+1), "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "18446744073709551616", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable, "NVIDIA_GPU_MEMORY_LIMIT"},
		{strings.TrimSuffix(variable, "="), "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "-1", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "+1", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + " 1", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "1 ", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "20Gi", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "abc", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "0x10", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "1_024", "NVIDIA_GPU_MEMORY_LIMIT"},
		{variable + "1.5", "NVIDIA_GPU_MEMORY_LIMIT"},
		{request + "abc", "NVIDIA_GPU_MEMORY_REQUEST"},
	} {
		group, out, err := n.call(t, c.env)
		if l, have := n.limits(t)[entry{group, n.UUID(0)}]; err == nil || have || !strings.Contains(out, c.want) {
			t.Errorf("%q: %v %v: %s", c.env, l, err, out)
		}
	}
	if _, out, err := n.call(t, request+"2", variable+"1"); err == nil || !strings.Contains(out, "exceeds") {
		t.Errorf("more reserved than allowed: %v: %s", err, out)
	}
	if group, out, err := n.call(t, variable+"10", variable+"99999"); err != nil || n.limits(t)[entry{group, n.UUID(0)}].hard != 10*mib {
		t.Errorf("two values: %v %v: %s", n.limits(t)[entry{group, n.UUID(0)}], err, out)
	}
}

// Of two values that are there before those of CDI the first one counts: with a variable of the image and one of the pod the container has the policy's value in
// its environment, and the driver another limit: fence 27. So the agent reads what the driver has.
func TestContainerd(t *testing.T) {
	n := newNode(t)
	d := startContainerd(t, map[string][]string{
		"localhost/plain:1": nil, "localhost/more:1": {variable + "71680"}, "localhost/less:1": {variable + "1024"},
	})
	equal := limit{20480 * mib, 20480 * mib}
	for name, c := range map[string]struct {
		image, fails string
		env, names   []string
		want         limit
	}{
		"CDI alone":           {image: "plain", want: equal},
		"pod":                 {image: "plain", env: []string{variable + "71680"}, want: equal},
		"image":               {image: "more", want: equal},
		"image and pod":       {image: "more", env: []string{variable + "40960"}, want: limit{20480 * mib, 71680 * mib}},
		"plugin and pod":      {image: "plain", env: []string{variable + "30720", variable + "40960"}, want: limit{20480 * mib, 30720 * mib}},
		"less, image and pod": {image: "less", env: []string{variable + "40960"}, fails: "memory request (20480 MiB) exceeds memory limit (1024 MiB)"},
		"the last CDI name":   {image: "plain", names: []string{limitOf(10240)}, want: limit{10240 * mib, 10240 * mib}},
	} {
		t.Run(name, func(t *testing.T) {
			got := d.run(t, "localhost/"+c.image+":1", c.env, append([]string{gpuOf(n.UUID(0)), limitOf(20480)}, c.names...)...)
			if c.fails != "" || got.err != "" {
				if c.fails == "" || !strings.Contains(got.err, c.fails) {
					t.Errorf("%q, want %q", got.err, c.fails)
				}
				return
			}
			if l := n.limits(t)[entry{got.group, n.UUID(0)}]; l != c.want {
				t.Errorf("the driver has %v, want %v", l, c.want)
			}
			if seen := environment(t, got.group); len(c.names) == 0 && !slices.Contains(seen, variable+"20480") {
				t.Errorf("the container has %q", seen)
			}
		})
	}
}

// call calls the hook as a container runtime does, for a process of a new group and a container with variables.
func (n *node) call(t *testing.T, env ...string) (group, out string, err error) {
	t.Helper()
	n.containers++
	group = "/" + ownGroup + "/call" + strconv.Itoa(n.containers)
	must(t, os.MkdirAll(filepath.Join(hierarchy, group), 0o755))
	at, err := os.Open(filepath.Join(hierarchy, group))
	must(t, err)
	defer func() { _ = at.Close() }()
	process := exec.Command("sleep", "600")
	process.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(at.Fd())}
	must(t, process.Start())
	defer func() { _ = process.Process.Kill(); _ = process.Wait() }()
	bundle := t.TempDir()
	must(t, os.WriteFile(bundle+"/config.json", encode(t, oci.Spec{Version: "1.0.2", Process: &oci.Process{Cwd: "/", Env: env}}), 0o644))
	cmd := exec.CommandContext(t.Context(), n.hook(), "apply-cuda-memory-limits", "--driver-root", n.Root, "--gpu-id", n.UUID(0))
	cmd.Stdin = bytes.NewReader(encode(t, oci.State{Version: "1.0.2", ID: "c", Status: oci.StateCreated, Pid: process.Process.Pid, Bundle: bundle}))
	text, err := cmd.CombinedOutput()
	return group, string(text), err
}

// matches reports whether a text has a pattern, without the backslashes by which programs quote each other's errors.
func matches(pattern, text string) bool {
	return regexp.MustCompile("(?s)" + pattern).MatchString(strings.ReplaceAll(text, `\`, ""))
}

// A variable of podman's command line counts before that of CDI, and the container has the latter in its environment: fence 28.
func TestPodman(t *testing.T) {
	if _, err := exec.LookPath("podman"); err != nil {
		t.Skip("SKIPPED: podman is not installed")
	}
	n := newNode(t)
	dir := t.TempDir()
	rootfs(t, dir+"/rootfs")
	writeRunc(t, dir+"/runc")
	for name, c := range map[string]struct {
		flags []string
		want  limit
	}{
		"CDI alone": {want: limit{20480 * mib, 20480 * mib}},
		"--env":     {flags: []string{"--env=" + variable + "71680"}, want: limit{20480 * mib, 71680 * mib}},
	} {
		t.Run(name, func(t *testing.T) {
			before := n.limits(t)
			out, err := output(exec.CommandContext(t.Context(), "podman", slices.Concat([]string{
				"--root=" + t.TempDir(), "--runroot=/run/podman", "--runtime=" + dir + "/runc", "--storage-driver=vfs", "--cgroup-manager=cgroupfs",
				"--events-backend=none", "run", "--rm", "--network=none", "--cgroup-parent=/" + ownGroup + "/podman",
				"--device=" + gpuOf(n.UUID(0)), "--device=" + limitOf(20480),
			}, c.flags, []string{"--rootfs", dir + "/rootfs", "/bin/busybox", "env"})...))
			must(t, err)
			if !slices.Contains(strings.Split(out, "\n"), variable+"20480") {
				t.Errorf("the container has %q", out)
			}
			after := n.limits(t)
			maps.DeleteFunc(after, func(e entry, _ limit) bool { _, have := before[e]; return have })
			for e, l := range after {
				if len(after) != 1 || !strings.HasPrefix(e.group, "/"+ownGroup+"/podman/libpod-") || e.gpu != n.UUID(0) || l != c.want {
					t.Errorf("the driver has %v, want %v", after, c.want)
				}
			}
			if len(after) == 0 {
				t.Error("the driver has no limit")
			}
		})
	}
}
