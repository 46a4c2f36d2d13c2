//go:build release

package release

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// dist is the folder with the release.
func dist(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("RELEASE_DIST")
	if folder == "" {
		t.Fatal("RELEASE_DIST is not set: run make release-check")
	}
	return folder
}

func command(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).Output()
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, stderrOf(err))
	}
	return string(out)
}

func stderrOf(err error) string {
	if e, ok := err.(*exec.ExitError); ok { //nolint:errorlint // only Output fills it, unwrapped
		return string(e.Stderr)
	}
	return ""
}

func digestOf(t *testing.T, path string) string {
	t.Helper()
	sum := sha256.Sum256([]byte(read(t, path)))
	return hex.EncodeToString(sum[:])
}

// unpack unpacks an artefact into a folder of the test.
func unpack(t *testing.T, path string) string {
	t.Helper()
	folder := t.TempDir()
	switch {
	case strings.HasSuffix(path, ".deb"):
		command(t, "dpkg-deb", "--extract", path, folder)
	case strings.HasSuffix(path, ".oci.tar"):
		t.Fatal("an image has layers")
	default: // .tar.gz, .tgz, .zip, .rpm
		command(t, "bsdtar", "-xf", path, "-C", folder)
	}
	return folder
}

// artefacts lists what contains binaries, by architecture.
func artefacts(t *testing.T, arch string) []string {
	t.Helper()
	other := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[arch]
	pattern := regexp.MustCompile(`[_.-](` + arch + `|` + other + `)\.(tar\.gz|zip|deb|rpm)$`)
	entries, err := os.ReadDir(dist(t))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, e := range entries {
		if !strings.Contains(e.Name(), makeVersion(t)) && e.Type().IsRegular() && !strings.HasPrefix(e.Name(), "SHA256SUMS") {
			t.Errorf("%s does not name the version", e.Name())
		}
		if pattern.MatchString(e.Name()) {
			found = append(found, filepath.Join(dist(t), e.Name()))
		}
	}
	return found
}

// Each artefact has the very binaries of dist/linux-ARCH, with the licenses of what they link, and nothing that only root may read.
func TestArtefacts(t *testing.T) {
	version := makeVersion(t)
	for _, arch := range []string{"amd64", "arm64"} {
		built := map[string]string{}
		for _, binary := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
			path := filepath.Join(dist(t), "linux-"+arch, binary)
			built[binary] = digestOf(t, path)
			if binary != "gpu-fleet" { // static
				checkGlibc(t, path)
			}
		}
		found := artefacts(t, arch)
		for _, want := range []string{
			"tandem_" + version + "_linux_" + arch + ".tar.gz", "nomad-gpu_" + version + "_linux_" + arch + ".zip",
		} {
			if !slices.Contains(found, filepath.Join(dist(t), want)) {
				t.Errorf("no %s", want)
			}
		}
		if len(found) != 8 {
			t.Errorf("%s: %d artefacts, want an archive, a zip, three debs and three rpms: %q", arch, len(found), found)
		}
		for _, path := range found {
			t.Run(filepath.Base(path), func(t *testing.T) { checkArtefact(t, path, built) })
		}
	}
}

func checkArtefact(t *testing.T, path string, built map[string]string) {
	names := []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"}
	switch base := filepath.Base(path); {
	case strings.Contains(base, "nomad-gpu"):
		names = names[:1]
	case strings.Contains(base, "k8s-gpu"):
		names = names[1:2]
	case strings.Contains(base, "gpu-fleet"):
		names = names[2:]
	}
	folder := unpack(t, path)
	licenses := ""
	seen := map[string]string{}
	err := filepath.WalkDir(folder, func(file string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode()&0o044 != 0o044 || info.Mode()&0o7022 != 0 {
			t.Errorf("%s has the mode %v", file, info.Mode())
		}
		if _, ok := built[d.Name()]; ok && info.Mode()&0o111 == 0o111 {
			seen[d.Name()] = digestOf(t, file)
		}
		licenses += license(t, file)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if seen[name] != built[name] {
			t.Errorf("%s has the digest %q, that of dist is %s", name, seen[name], built[name])
		}
	}
	if len(seen) != len(names) {
		t.Errorf("binaries %v, want %q", seen, names)
	}
	wants := []string{"Apache License", "The Go Authors", "github.com/prometheus/client_golang"}
	if slices.Contains(names, "nomad-gpu") {
		wants = append(wants, "Mozilla Public License", "Business Source License 1.1", "github.com/hashicorp/go-plugin")
	}
	for _, want := range wants {
		if !strings.Contains(licenses, want) {
			t.Errorf("no license file contains %q", want)
		}
	}
}

// license is the content of a file if it has licenses.
func license(t *testing.T, file string) string {
	t.Helper()
	lower := strings.ToLower(file)
	if !strings.Contains(lower, "license") && !strings.HasSuffix(lower, "copyright") {
		return ""
	}
	if strings.HasSuffix(file, ".gz") {
		return command(t, "gzip", "-dc", file)
	}
	return read(t, file)
}

// The archive has the documents and the manifests of this version, so that nothing else is needed on a machine without a network.
func TestArchiveIsComplete(t *testing.T) {
	name := "tandem_" + makeVersion(t) + "_linux_" + runtime.GOARCH
	folder := filepath.Join(unpack(t, filepath.Join(dist(t), name+".tar.gz")), name)
	for _, file := range []string{"README.md", "CHANGELOG.md", "LICENSE", "docs/install.md", "deploy/daemonset.yaml", "deploy/README.md", "tools/release/verify"} {
		if read(t, filepath.Join(folder, file)) != read(t, root+file) {
			t.Errorf("%s differs from that of the commit", file)
		}
	}
	for _, binary := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
		if got := command(t, filepath.Join(folder, binary), "--version"); !strings.Contains(got, makeVersion(t)) {
			t.Errorf("%s --version: %s", binary, got)
		}
	}
}

// The table of docs/licenses.md and the file of licenses are made independently, and agree.
func TestLicensesAreThoseOfTheDocument(t *testing.T) {
	row := regexp.MustCompile(`(?m)^\| (\S+) \| (\S+) \| (.*) \|$`)
	rows := row.FindAllStringSubmatch(read(t, root+"docs/licenses.md"), -1)
	for _, binary := range []string{"nomad-gpu", "k8s-gpu", "gpu-fleet"} {
		text := read(t, filepath.Join(dist(t), "licenses/linux-"+runtime.GOARCH, binary, "THIRD-PARTY-LICENSES.txt"))
		listed := map[string]string{} // module to expression
		for _, m := range regexp.MustCompile(`(?m)^(\S+) v\S+\n    (.+)\n    https://`).FindAllStringSubmatch(text, -1) {
			listed[m[1]] = m[2]
		}
		documented := map[string]bool{}
		for _, r := range rows {
			if !strings.Contains(r[3], binary) || strings.HasPrefix(r[1], "license") {
				continue
			}
			documented[r[2]] = true
			if !slices.Contains(strings.Split(listed[r[2]], " AND "), r[1]) {
				t.Errorf("%s: docs/licenses.md has %s for %s, the file of licenses %q", binary, r[1], r[2], listed[r[2]])
			}
		}
		if len(documented) != len(listed) || len(listed) < 20 {
			t.Errorf("%s: %d modules in docs/licenses.md, %d in the file of licenses", binary, len(documented), len(listed))
		}
	}
}

func decode(t *testing.T, path string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(read(t, path)), into); err != nil {
		t.Fatal(fmt.Errorf("%s: %w", path, err))
	}
}
