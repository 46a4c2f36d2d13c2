//go:build release

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// key is the path of the key that signed the release, without ".key" and ".pub".
func key(t *testing.T) string {
	t.Helper()
	path := os.Getenv("RELEASE_KEY")
	if path == "" {
		t.Fatal("RELEASE_KEY is not set: run make release-check")
	}
	return path
}

// download is the release as a user has it: links to the files, so that a file that is replaced stays what it was in dist.
func download(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	entries, err := os.ReadDir(dist(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type().IsRegular() {
			if err := os.Symlink(filepath.Join(dist(t), e.Name()), filepath.Join(folder, e.Name())); err != nil {
				t.Fatal(err)
			}
		}
	}
	return folder
}

func replace(t *testing.T, path, content string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// flip changes one bit in the middle of a file.
func flip(t *testing.T, path string) {
	content := []byte(read(t, path))
	content[len(content)/2] ^= 1
	replace(t, path, string(content))
}

// verify runs the program that docs/releasing.md gives to users.
func verify(t *testing.T, folder, public string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), root+"tools/release/verify", folder, public).CombinedOutput()
	return string(out), err
}

func TestVerifyAccepts(t *testing.T) {
	out, err := verify(t, download(t), key(t)+".pub")
	if err != nil || !strings.Contains(out, "verified: ") || !strings.Contains(out, strings.TrimSpace(command(t, "git", "-C", root, "rev-parse", "HEAD"))) {
		t.Errorf("%v: %s", err, out)
	}
}

// Each change of a release is refused, with the reason.
func TestVerifyRefuses(t *testing.T) {
	provenance := "tandem_" + makeVersion(t) + "_provenance"
	archive := "tandem_" + makeVersion(t) + "_linux_arm64.tar.gz"
	image := "k8s-gpu-" + makeVersion(t) + ".oci.tar"
	for name, c := range map[string]struct {
		change func(t *testing.T, folder string)
		want   string
	}{
		"an archive":     {func(t *testing.T, f string) { flip(t, f+"/"+archive) }, archive + ": FAILED"},
		"the image":      {func(t *testing.T, f string) { flip(t, f+"/"+image) }, image + ": FAILED"},
		"an SBOM":        {func(t *testing.T, f string) { flip(t, f+"/"+archive+".spdx.json") }, "spdx.json: FAILED"},
		"the provenance": {func(t *testing.T, f string) { flip(t, f+"/"+provenance+".json") }, provenance + ".json: FAILED"},
		"the checksums":  {func(t *testing.T, f string) { flip(t, f+"/SHA256SUMS") }, "verify-blob"},
		"another file": {func(t *testing.T, f string) {
			if err := os.WriteFile(f+"/other.deb", nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "other.deb is not in SHA256SUMS"},
		"a file is missing": {func(t *testing.T, f string) { remove(t, f+"/"+archive) }, archive},
		"another signature of the checksums": {func(t *testing.T, f string) {
			replace(t, f+"/SHA256SUMS.sigstore.json", read(t, f+"/"+provenance+".sigstore.json"))
		}, "verify-blob"},
		"a signed statement is changed": {func(t *testing.T, f string) {
			bundle := read(t, f+"/"+provenance+".sigstore.json")
			at := strings.Index(bundle, `"payload":"`) + len(`"payload":"`)
			replace(t, f+"/"+provenance+".sigstore.json", bundle[:at+40]+strings.Repeat("A", 4)+bundle[at+44:])
		}, "verify: "},
		"no file is in the signed provenance": {func(t *testing.T, f string) { otherSubjects(t, f) }, "the provenance has other files"},
		"the sums of a changed file are changed, too": {func(t *testing.T, f string) {
			before := digestOf(t, f+"/"+archive)
			flip(t, f+"/"+archive)
			replace(t, f+"/SHA256SUMS", strings.Replace(read(t, f+"/SHA256SUMS"), before, digestOf(t, f+"/"+archive), 1))
		}, "verify-blob"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			folder := download(t)
			c.change(t, folder)
			if out, err := verify(t, folder, key(t)+".pub"); err == nil || !strings.Contains(out, c.want) {
				t.Errorf("%v, want %q: %s", err, c.want, out)
			}
		})
	}
	t.Run("another key", func(t *testing.T) {
		t.Parallel()
		if out, err := verify(t, download(t), newKey(t)+".pub"); err == nil || !strings.Contains(out, "verify-blob") {
			t.Errorf("%v: %s", err, out)
		}
	})
}

// otherSubjects signs, with the right key, a provenance that lacks a file of the release.
func otherSubjects(t *testing.T, folder string) {
	path := filepath.Join(folder, "tandem_"+makeVersion(t)+"_provenance.json")
	before := digestOf(t, path)
	replace(t, path, command(t, "jq", "del(.subject[-1])", path))
	replace(t, folder+"/SHA256SUMS", strings.Replace(read(t, folder+"/SHA256SUMS"), before, digestOf(t, path), 1))
	for _, bundle := range []string{"SHA256SUMS", "tandem_" + makeVersion(t) + "_provenance"} {
		remove(t, filepath.Join(folder, bundle+".sigstore.json"))
	}
	command(t, root+"tools/release/sign", folder, key(t)+".key")
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// newKey makes a key and returns its path without ".key" and ".pub".
func newKey(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "other")
	command(t, "cosign", "generate-key-pair", "--output-key-prefix", path)
	return path
}
