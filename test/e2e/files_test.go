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
	"strings"
	"testing"
)

// render copies testdata/<name> into the state folder, with every @KEY@ replaced, and gives its path.
func render(t *testing.T, name string, values map[string]string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range values {
		text = bytes.ReplaceAll(text, []byte("@"+key+"@"), []byte(value))
	}
	return write(t, name, text)
}

func write(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(stateDir(), name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// saveImage writes a container image as an archive that "ctr images import" reads: Debian's static busybox
// and the given programs, each with the libraries it links. There is no registry to pull one from.
func saveImage(t *testing.T, name string, entrypoint []string, programs ...string) string {
	t.Helper()
	layer := buildLayer(t, programs)
	layerID := fmt.Sprintf("%x", sha256.Sum256(layer))
	config := encode(t, map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Entrypoint": entrypoint, "Env": []string{"PATH=/usr/bin:/bin"}},
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
		for _, field := range strings.Fields(must(t, "ldd", program)) {
			if strings.HasPrefix(field, "/") && !seen[field] {
				seen[field] = true
				addFrom(t, w, field, strings.TrimPrefix(field, "/"))
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return layer.Bytes()
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
