package hooks

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/cri-api/pkg/apis/runtime/v1"
)

// containerd is containerd 2.4, which is asked for containers as kubelet does.
type containerd struct {
	runtime v1.RuntimeServiceClient
	dir     string
	pods    int
}

const containerdSocket = "/run/containerd/containerd.sock"

// containerdConfig has what these containers need. A runc without CAP_SYS_RESOURCE may not lower oom_score_adj.
const containerdConfig = `version = 4
root = "@DIR@/root"
state = "/run/containerd"
imports = []
[plugins."io.containerd.server.v1.grpc"]
  address = "` + containerdSocket + `"
[plugins."io.containerd.server.v1.ttrpc"]
  address = "` + containerdSocket + `.ttrpc"
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
  platform = "linux/amd64"
  snapshotter = "native"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "localhost/plain:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  cdi_spec_dirs = ["` + specFolder + `"]
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
      BinaryName = "@DIR@/runc"
`

// startContainerd starts containerd, with images whose variables are given by their names.
func startContainerd(t *testing.T, images map[string][]string) *containerd {
	t.Helper()
	d := &containerd{dir: t.TempDir()}
	writeRunc(t, d.dir+"/runc")
	must(t, os.WriteFile(d.dir+"/config.toml", []byte(strings.ReplaceAll(containerdConfig, "@DIR@", d.dir)), 0o644))
	log, err := os.Create(d.dir + "/log")
	must(t, err)
	cmd := exec.Command("containerd", "--config="+d.dir+"/config.toml", "--log-level=warn")
	cmd.Stdout, cmd.Stderr = log, log
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		if text, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("containerd:\n%s", text)
		}
	})
	conn, err := grpc.NewClient("unix://"+containerdSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	d.runtime = v1.NewRuntimeServiceClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), plenty)
	defer cancel()
	_, err = d.runtime.Version(ctx, &v1.VersionRequest{}, grpc.WaitForReady(true))
	must(t, err)
	for name, env := range images {
		archive := filepath.Join(d.dir, "image.tar")
		must(t, os.WriteFile(archive, image(t, name, env), 0o644))
		_, err := output(exec.CommandContext(ctx, "ctr", "--address="+containerdSocket, "--namespace=k8s.io", "images", "import", "--snapshotter=native", archive))
		must(t, err)
	}
	return d
}

// image is the archive of an image with busybox and variables.
func image(t *testing.T, name string, env []string) []byte {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	must(t, err)
	layer := archive(t, map[string][]byte{"bin/busybox": busybox, "etc/hostname": nil, "tmp/empty": nil, "usr/lib/empty": nil})
	layerID := fmt.Sprintf("%x", sha256.Sum256(layer))
	config := encode(t, map[string]any{
		"architecture": "amd64", "os": "linux", "rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerID}},
		"config": map[string]any{"Entrypoint": []string{"/bin/busybox", "sleep", "600"}, "Env": append([]string{"PATH=/bin"}, env...)},
	})
	configFile := fmt.Sprintf("%x.json", sha256.Sum256(config))
	return archive(t, map[string][]byte{
		configFile: config, layerID + ".tar": layer,
		"manifest.json": encode(t, []any{map[string]any{"Config": configFile, "RepoTags": []string{name}, "Layers": []string{layerID + ".tar"}}}),
	})
}

func archive(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var text bytes.Buffer
	w := tar.NewWriter(&text)
	for name, content := range files {
		must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))}))
		_, err := w.Write(content)
		must(t, err)
	}
	must(t, w.Close())
	return text.Bytes()
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	must(t, err)
	return text
}

// run starts a pod with a container, as kubelet asks for it: env has the variables of the device plugin before those of the pod.
func (d *containerd) run(t *testing.T, image string, env []string, names ...string) container {
	t.Helper()
	d.pods++
	ctx, cancel := context.WithTimeout(t.Context(), plenty)
	defer cancel()
	uid := fmt.Sprintf("pod%d", d.pods)
	pod := &v1.PodSandboxConfig{
		Metadata: &v1.PodSandboxMetadata{Name: uid, Uid: uid, Namespace: "default"}, LogDirectory: d.dir + "/pods",
		Linux: &v1.LinuxPodSandboxConfig{
			CgroupParent:    "/" + ownGroup + "/" + uid,
			SecurityContext: &v1.LinuxSandboxSecurityContext{NamespaceOptions: &v1.NamespaceOption{Network: v1.NamespaceMode_NODE}},
		},
	}
	sandbox, err := d.runtime.RunPodSandbox(ctx, &v1.RunPodSandboxRequest{Config: pod})
	must(t, err)
	t.Cleanup(func() { d.remove(t, sandbox.GetPodSandboxId()) })
	config := &v1.ContainerConfig{
		Metadata: &v1.ContainerMetadata{Name: "c"}, Image: &v1.ImageSpec{Image: image}, LogPath: uid + ".log",
		Linux: &v1.LinuxContainerConfig{SecurityContext: &v1.LinuxContainerSecurityContext{
			NamespaceOptions: &v1.NamespaceOption{Network: v1.NamespaceMode_NODE},
		}},
	}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		config.Envs = append(config.Envs, &v1.KeyValue{Key: name, Value: []byte(value)})
	}
	for _, name := range names {
		config.CDIDevices = append(config.CDIDevices, &v1.CDIDevice{Name: name})
	}
	made, err := d.runtime.CreateContainer(ctx, &v1.CreateContainerRequest{PodSandboxId: sandbox.GetPodSandboxId(), Config: config, SandboxConfig: pod})
	must(t, err)
	c := container{group: pod.GetLinux().GetCgroupParent() + "/" + made.GetContainerId()}
	if _, err := d.runtime.StartContainer(ctx, &v1.StartContainerRequest{ContainerId: made.GetContainerId()}); err != nil {
		c.err = err.Error()
	}
	return c
}

// remove ends a pod; the test's context has ended.
func (d *containerd) remove(t *testing.T, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), plenty)
	defer cancel()
	_, err := d.runtime.StopPodSandbox(ctx, &v1.StopPodSandboxRequest{PodSandboxId: id})
	must(t, err)
	_, err = d.runtime.RemovePodSandbox(ctx, &v1.RemovePodSandboxRequest{PodSandboxId: id})
	must(t, err)
}

// environment are the variables of the first process of a group, which is runc itself for a moment.
func environment(t *testing.T, group string) []string {
	t.Helper()
	for end := time.Now().Add(plenty); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		processes, err := os.ReadFile(filepath.Join(hierarchy, group, "cgroup.procs"))
		must(t, err)
		first, _, _ := strings.Cut(string(processes), "\n")
		text, err := os.ReadFile("/proc/" + first + "/environ")
		must(t, err)
		if all := strings.Split(strings.TrimRight(string(text), "\x00"), "\x00"); slices.Contains(all, "PATH=/bin") {
			return all
		}
	}
	t.Fatal("the container has no environment")
	return nil
}
