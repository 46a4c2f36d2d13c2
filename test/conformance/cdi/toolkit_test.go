package cdi

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// Under auto, the hooks of a specification are those that the hook program of the node has: each of them, called as a container
// runtime does, ends without an error with nvidia-ctk 1.17.8. A listed strategy has hooks that it refuses, and a warning.
func TestOldHookProgram(t *testing.T) {
	for _, auto := range []bool{true, false} {
		h := newHost(t)
		program := h.root + "/usr/bin/nvidia-ctk"
		build := exec.CommandContext(t.Context(), "go", "build", "-o", program,
			"-ldflags", "-X github.com/NVIDIA/nvidia-container-toolkit/internal/info.version=1.17.8", "github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk")
		build.Dir = "toolkit"
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		h.HookPath, h.Auto = program, auto
		h.m.cfg.Injection.CDI = inventory.CDIAuto
		s := coretest.GPUs(1)
		h.nodes(t, s.Nodes, 511)
		w := h.run(t)
		h.m.read(t, s)
		if c := h.m.State().Host.CDI; !c.Usable || auto && !strings.Contains(c.Reason, "version 1.17.8") {
			t.Errorf("auto %v: %+v", auto, c)
		}
		var refused []string
		for _, hook := range h.hooks(t) {
			if out, err := callHook(t, hook); err != nil {
				refused = append(refused, hook.Args[2])
				if auto {
					t.Errorf("%q: %v: %s", hook.Args, err, out)
				}
			}
		}
		if auto {
			continue
		}
		if want := []string{"disable-device-node-modification", "update-application-profile"}; !slices.Equal(refused, want) {
			t.Errorf("refused: %v, want %v", refused, want)
		}
		if lines := problem.Lines(w.Problems()); len(lines) != 1 || !strings.Contains(lines[0], "has version 1.17.8, which refuses hooks") {
			t.Errorf("warnings %q", lines)
		}
	}
}

// hook is a hook of a specification.
type hook struct {
	Path string
	Args []string
	Env  []string
}

// hooks are those that each container gets.
func (h *host) hooks(t *testing.T) []hook {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(h.Folder, vendor+"-gpu.json"))
	must(t, err)
	var s struct{ ContainerEdits struct{ Hooks []hook } }
	must(t, json.Unmarshal(text, &s))
	return s.ContainerEdits.Hooks
}

// callHook calls a hook for a container with an empty root, which is a mount as that of a container is.
func callHook(t *testing.T, hook hook) ([]byte, error) {
	t.Helper()
	bundle := folder(t, "")
	root := filepath.Join(bundle, "rootfs")
	for _, dir := range []string{"/usr/lib/x86_64-linux-gnu/vdpau", "/etc", "/sbin", "/proc", "/dev"} {
		must(t, os.MkdirAll(root+dir, 0o755))
	}
	must(t, os.WriteFile(bundle+"/config.json", []byte(`{"ociVersion": "1.0.2", "root": {"path": "rootfs"}}`), 0o644))
	cmd := exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "sh", "-c",
		`mount --bind "$0" "$0" && mount --make-rprivate "$0" && exec "$@"`, root, hook.Path}, hook.Args[1:]...)...)
	cmd.Env = hook.Env
	cmd.Stdin = strings.NewReader(`{"ociVersion": "1.0.2", "id": "c", "status": "created", "pid": 1, "bundle": "` + bundle + `"}`)
	return cmd.CombinedOutput()
}
