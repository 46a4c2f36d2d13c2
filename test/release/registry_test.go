//go:build release

package release

import (
	"bufio"
	"io"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// startRegistry runs a registry on this machine and returns its address.
func startRegistry(t *testing.T) string {
	t.Helper()
	registry := exec.CommandContext(t.Context(), "crane", "registry", "serve", "--address", "127.0.0.1:0")
	stderr, err := registry.StderrPipe()
	if err == nil {
		err = registry.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = registry.Process.Kill(); _ = registry.Wait() })
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		if m := regexp.MustCompile(`serving on port (\d+)`).FindStringSubmatch(lines.Text()); m != nil {
			go func() { _, _ = io.Copy(io.Discard, stderr) }()
			return "127.0.0.1:" + m[1]
		}
	}
	t.Fatal("the registry has no port")
	return ""
}

func cosign(t *testing.T, public string, args ...string) (string, error) {
	t.Helper()
	args = append(args[:1:1], append([]string{"--key", public, "--insecure-ignore-tlog=true", "--allow-http-registry"}, args[1:]...)...)
	out, err := exec.CommandContext(t.Context(), "cosign", args...).CombinedOutput()
	return string(out), err
}

// The image is pushed, signed, verified and copied to another registry, as docs/releasing.md describes, and stays the same digest.
func TestRegistry(t *testing.T) {
	registry := startRegistry(t) + "/tandem"
	public := key(t) + ".pub"
	_, index := layout(t, "k8s-gpu")
	out := command(t, root+"tools/release/push", dist(t), registry, key(t)+".key", "http")
	want := registry + "/k8s-gpu:" + makeVersion(t) + "@" + index
	if !strings.Contains(out, want) {
		t.Fatalf("pushed %q, want %s", out, want)
	}
	name := registry + "/k8s-gpu@" + index
	if out, err := cosign(t, public, "verify", name); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	if out, err := cosign(t, newKey(t)+".pub", "verify", name); err == nil {
		t.Errorf("another key: %s", out)
	}
	if out, err := cosign(t, public, "verify-attestation", "--type=slsaprovenance1", name); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	for _, i := range slices.Concat(images(t, "k8s-gpu"), images(t, "gpu-fleet")) {
		platform := registry + "/" + i.binary + "@" + i.digest
		for _, args := range [][]string{{"verify", platform}, {"verify-attestation", "--type=spdxjson", platform}} {
			if out, err := cosign(t, public, args...); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		}
	}
	changed := strings.TrimSpace(command(t, "crane", "mutate", "--insecure", registry+"/k8s-gpu:"+makeVersion(t)+"", "--label=a=b", "--tag="+registry+"/k8s-gpu:changed"))
	if out, err := cosign(t, public, "verify", changed); err == nil {
		t.Errorf("an image that was changed is accepted: %s", out)
	}
	checkMirror(t, name, index)
	checkChart(t, registry, out, "tandem-k8s-gpu")
	checkChart(t, registry, out, "gpu-fleet")
}

// checkMirror copies the image with its signature over a folder, as to a site without a network.
func checkMirror(t *testing.T, name, index string) {
	mirror := startRegistry(t) + "/mirror/k8s-gpu"
	folder := t.TempDir()
	command(t, "cosign", "save", "--allow-http-registry", "--dir", folder, name)
	command(t, "cosign", "load", "--allow-http-registry", "--dir", folder, mirror+":"+makeVersion(t))
	if got := strings.TrimSpace(command(t, "crane", "digest", "--insecure", mirror+":"+makeVersion(t))); got != index {
		t.Errorf("the copy has the digest %s, the image %s", got, index)
	}
	if out, err := cosign(t, key(t)+".pub", "verify", mirror+"@"+index); err != nil {
		t.Errorf("the copy: %v: %s", err, out)
	}
	plain := startRegistry(t) + "/plain/k8s-gpu"
	command(t, "crane", "copy", "--insecure", name, plain+":"+makeVersion(t))
	if got := strings.TrimSpace(command(t, "crane", "digest", "--insecure", plain+":"+makeVersion(t))); got != index {
		t.Errorf("the copy of crane has the digest %s, the image %s", got, index)
	}
}

// checkChart pulls the chart and compares it with the file.
func checkChart(t *testing.T, registry, pushed, name string) {
	t.Helper()
	file := filepath.Join(dist(t), name+"-"+makeVersion(t)+".tgz")
	digest := regexp.MustCompile(`/charts/` + name + `:\S+@(sha256:\S+)`).FindStringSubmatch(pushed)
	if digest == nil {
		t.Fatalf("no chart was pushed: %s", pushed)
	}
	if out, err := cosign(t, key(t)+".pub", "verify", registry+"/charts/"+name+"@"+digest[1]); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	folder := t.TempDir()
	command(t, "helm", "pull", "--plain-http", "--destination", folder, "--version", makeVersion(t), "oci://"+registry+"/charts/"+name)
	if digestOf(t, filepath.Join(folder, filepath.Base(file))) != digestOf(t, file) {
		t.Error("the chart in the registry is not that of dist")
	}
}
