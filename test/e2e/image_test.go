//go:build e2e

package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// pluginImage returns the image archive that "make image" has built. It has the name that deploy/daemonset.yaml has.
func pluginImage() string { return os.Getenv("E2E_IMAGE") }

// saveImage writes a container image as an archive that "ctr images import" reads: Debian's static busybox
// and the given programs, each with the libraries it links. There is no registry to pull one from.
func saveImage(t *testing.T, name string, entrypoint []string, programs ...string) string {
	t.Helper()
	return saveImageWith(t, name, nil, entrypoint, programs...)
}

// saveImageWith is saveImage for an image with variables of its own.
func saveImageWith(t *testing.T, name string, env, entrypoint []string, programs ...string) string {
	t.Helper()
	layer := buildLayer(t, programs)
	layerID := fmt.Sprintf("%x", sha256.Sum256(layer))
	config := encode(t, map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": entrypoint, "Env": append([]string{"PATH=/usr/bin:/bin"}, env...)},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + layerID}},
	})
	configFile := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest := encode(t, []map[string]any{{
		"Config": configFile, "RepoTags": []string{name}, "Layers": []string{layerID + ".tar"},
	}})
	var image bytes.Buffer
	w := tar.NewWriter(&image)
	addFile(t, w, configFile, config)
	addFile(t, w, layerID+".tar", layer)
	addFile(t, w, "manifest.json", manifest)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return write(t, "images/"+strings.NewReplacer("/", "_", ":", "_").Replace(name)+".tar", image.Bytes())
}

func buildLayer(t *testing.T, programs []string) []byte {
	t.Helper()
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	add := func(h tar.Header) {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp", "usr", "usr/bin", "var"} {
		add(tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755})
	}
	addFrom(t, w, "/bin/busybox", "bin/busybox")
	for _, applet := range []string{"sh", "sleep", "env", "cat"} {
		add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox", Mode: 0o777})
	}
	seen := map[string]bool{}
	for _, program := range programs {
		addFrom(t, w, program, "usr/bin/"+filepath.Base(program))
		for _, library := range linked(t, program) {
			if !seen[library] {
				seen[library] = true
				addFrom(t, w, library, strings.TrimPrefix(library, "/"))
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return layer.Bytes()
}

// linked returns the libraries that a program links, and their loader.
func linked(t *testing.T, program string) []string {
	t.Helper()
	text, err := command("ldd", program)
	if err != nil && !strings.Contains(err.Error(), "not a dynamic executable") {
		t.Fatal(err)
	}
	return slices.DeleteFunc(strings.Fields(text), func(field string) bool { return !strings.HasPrefix(field, "/") })
}

func addFrom(t *testing.T, w *tar.Writer, source, target string) {
	t.Helper()
	data, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	addFile(t, w, target, data)
}

func addFile(t *testing.T, w *tar.Writer, name string, data []byte) {
	t.Helper()
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(data))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
}

func encode(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
