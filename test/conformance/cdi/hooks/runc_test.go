package hooks

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"
)

// specFolder is where the agent writes, and podman and containerd read.
const specFolder = "/run/cdi"

// container is a container of runc, or what runc wrote because it did not start.
type container struct {
	group string // below the mount point
	err   string // of its start
}

// runc starts a container with devices of CDI names, whose process sleeps until the end of the test.
func (n *node) runc(t *testing.T, env []string, names ...string) container {
	t.Helper()
	n.containers++
	id := fmt.Sprintf("c%d", n.containers)
	c := container{group: "/" + ownGroup + "/pod/" + id}
	bundle := t.TempDir()
	spec := &oci.Spec{
		Version: "1.0.2", Root: &oci.Root{Path: "rootfs"},
		Process: &oci.Process{Cwd: "/", Args: []string{"/bin/busybox", "sleep", "600"}, Env: append([]string{"PATH=/bin"}, env...)},
		Mounts:  []oci.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}, {Destination: "/dev", Type: "tmpfs", Source: "tmpfs"}},
		Linux: &oci.Linux{CgroupsPath: c.group, Namespaces: []oci.LinuxNamespace{
			{Type: oci.MountNamespace}, {Type: oci.PIDNamespace}, {Type: oci.IPCNamespace},
		}},
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(n.specs), cdi.WithAutoRefresh(false))
	must(t, err)
	_, err = cache.InjectDevices(spec, names...)
	must(t, err)
	text, err := json.Marshal(spec)
	must(t, err)
	must(t, os.WriteFile(bundle+"/config.json", text, 0o644))
	rootfs(t, bundle+"/rootfs")
	log := bundle + "/runc.log"
	cmd := exec.CommandContext(t.Context(), "runc", "--root=/run/tandem-runc", "--log="+log, "run", "--detach", "--bundle="+bundle, id)
	// Without pipes, which the container would keep open.
	if err := cmd.Run(); err != nil {
		text, _ := os.ReadFile(log)
		c.err = fmt.Sprintf("%v: %s", err, text)
	}
	t.Cleanup(func() { _ = exec.Command("runc", "--root=/run/tandem-runc", "delete", "--force", id).Run() })
	return c
}

// rootfs makes the root of a container: busybox, and what NVIDIA's hooks change.
func rootfs(t *testing.T, root string) {
	t.Helper()
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "usr/lib"} {
		must(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	text, err := os.ReadFile("/bin/busybox")
	must(t, err)
	must(t, os.WriteFile(root+"/bin/busybox", text, 0o755))
}

const asRunc = "TANDEM_CONFORMANCE_RUNC" // the path of runc, for the program of writeRunc

// writeRunc makes a program that is runc for containerd.
func writeRunc(t *testing.T, path string) {
	t.Helper()
	self, err := os.Executable()
	must(t, err)
	runc, err := exec.LookPath("runc")
	must(t, err)
	must(t, os.WriteFile(path, fmt.Appendf(nil, "#!/bin/sh\n%s=%s exec %s \"$@\"\n", asRunc, runc, self), 0o755))
}

// runcWithoutResources runs runc in place of this process. A container gets no CPU shares or memory limits, for which a node may have no controller in its control
// groups of version 2: containerd gives some to all.
func runcWithoutResources() (int, error) {
	for i, arg := range os.Args[:len(os.Args)-1] {
		if arg != "--bundle" {
			continue
		}
		path := filepath.Join(os.Args[i+1], "config.json")
		text, err := os.ReadFile(path)
		if err != nil {
			return 1, err
		}
		var spec oci.Spec
		if err := json.Unmarshal(text, &spec); err != nil {
			return 1, err
		}
		spec.Linux.Resources = &oci.LinuxResources{Devices: spec.Linux.Resources.Devices}
		if text, err = json.Marshal(spec); err != nil {
			return 1, err
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			return 1, err
		}
	}
	return 1, syscall.Exec(os.Getenv(asRunc), append([]string{"runc"}, os.Args[1:]...), os.Environ())
}
