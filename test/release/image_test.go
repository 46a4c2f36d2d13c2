//go:build release

package release

import (
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// image is one architecture of the image, unpacked.
type image struct {
	binary             string
	arch, digest, root string
	config             imageConfig
	packed             int64 // bytes of its layers, compressed
}

type imageConfig struct {
	Created      time.Time
	Architecture string
	Config       struct {
		User, StopSignal, WorkingDir string
		Entrypoint, Cmd, Env         []string
		Labels                       map[string]string
		Volumes, Healthcheck         any
		ExposedPorts                 any
	}
}

type manifest struct {
	Config    descriptor
	Layers    []descriptor
	Manifests []descriptor
}

type descriptor struct {
	Digest   string
	Size     int64
	Platform struct{ Architecture, OS string }
}

// layout unpacks the archive of a binary's image and returns its folder and the digest of the image's index.
func layout(t *testing.T, binary string) (folder, index string) {
	t.Helper()
	folder = t.TempDir()
	command(t, "tar", "-xf", filepath.Join(dist(t), binary+"-"+makeVersion(t)+".oci.tar"), "-C", folder)
	var outer manifest
	decode(t, filepath.Join(folder, "index.json"), &outer)
	if len(outer.Manifests) != 1 {
		t.Fatalf("%d indexes", len(outer.Manifests))
	}
	return folder, outer.Manifests[0].Digest
}

func blob(folder, digest string) string {
	return filepath.Join(folder, "blobs/sha256", strings.TrimPrefix(digest, "sha256:"))
}

func images(t *testing.T, binary string) []image {
	t.Helper()
	folder, index := layout(t, binary)
	var inner manifest
	decode(t, blob(folder, index), &inner)
	var all []image
	for _, d := range inner.Manifests {
		var m manifest
		decode(t, blob(folder, d.Digest), &m)
		i := image{binary: binary, arch: d.Platform.Architecture, digest: d.Digest, root: t.TempDir()}
		decode(t, blob(folder, m.Config.Digest), &i.config)
		for _, layer := range m.Layers {
			i.packed += layer.Size
			command(t, "tar", "-xpf", blob(folder, layer.Digest), "-C", i.root)
		}
		all = append(all, i)
	}
	return all
}

func TestImage(t *testing.T) {
	for _, binary := range []string{"k8s-gpu", "gpu-fleet"} {
		t.Run(binary, func(t *testing.T) { checkImages(t, images(t, binary)) })
	}
}

func checkImages(t *testing.T, all []image) {
	if len(all) != 2 || all[0].arch != "amd64" || all[1].arch != "arm64" {
		t.Fatalf("%d images, want amd64 and arm64", len(all))
	}
	for _, i := range all {
		t.Run(i.arch, func(t *testing.T) {
			i.checkConfig(t)
			i.checkFiles(t)
			i.checkRuns(t)
		})
	}
}

func (i image) checkConfig(t *testing.T) {
	c := i.config.Config
	user := map[string]string{"k8s-gpu": "0:0", "gpu-fleet": "65532:65532"}[i.binary]
	if i.config.Architecture != i.arch || c.User != user || !slices.Equal(c.Entrypoint, []string{"/usr/bin/" + i.binary}) || len(c.Cmd) != 0 {
		t.Errorf("config %+v", i.config)
	}
	if c.StopSignal != "SIGTERM" || c.Healthcheck != nil || c.Volumes != nil || c.ExposedPorts != nil {
		t.Errorf("stop signal %q, health check %v, volumes %v, ports %v", c.StopSignal, c.Healthcheck, c.Volumes, c.ExposedPorts)
	}
	commit := strings.TrimSpace(command(t, "git", "-C", root, "rev-parse", "HEAD"))
	at := strings.TrimSpace(command(t, "git", "-C", root, "log", "-1", "--format=%ct"))
	created := time.Unix(must(json.Number(at).Int64()), 0).UTC()
	if !i.config.Created.Equal(created) {
		t.Errorf("created %s, the commit is of %s", i.config.Created, created)
	}
	for label, want := range map[string]string{
		"title": "^" + i.binary + "$", "description": "NVIDIA", "vendor": "^Tandem$", "licenses": "^Apache-2.0$",
		"source": "^https://", "url": "^https://", "documentation": "^https://",
		"version": "^" + regexp.QuoteMeta(makeVersion(t)) + "$", "revision": "^" + commit + "$", "created": "^" + created.Format(time.RFC3339) + "$",
	} {
		if got := c.Labels["org.opencontainers.image."+label]; !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("the label %s is %q, want %s", label, got, want)
		}
	}
}

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

// programs are names of shells, package managers and downloaders.
var programs = regexp.MustCompile(`^(sh|bash|dash|ash|zsh|busybox|toybox|env|apt.*|dpkg.*|apk|rpm|dnf|yum|perl|python.*|curl|wget|openssl|ldconfig)$`)

// checkFiles expects one program, the dynamic linker and libraries; the licenses; nothing that another user may write.
func (i image) checkFiles(t *testing.T) {
	var executables []string
	var size int64
	err := filepath.WalkDir(i.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == i.root {
			return err
		}
		name := strings.TrimPrefix(path, i.root)
		info, err := d.Info()
		if err != nil {
			return err
		}
		switch mode := info.Mode(); {
		case programs.MatchString(d.Name()) && !d.IsDir():
			t.Errorf("the image has %s", name)
		case mode&(fs.ModeSetuid|fs.ModeSetgid) != 0, mode&fs.ModeSymlink == 0 && mode&0o002 != 0 && name != "/tmp":
			t.Errorf("%s has the mode %v", name, mode)
		case mode.IsRegular():
			size += info.Size()
			if mode&0o111 != 0 && !strings.Contains(name, "/lib") {
				executables = append(executables, name)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(executables, []string{"/usr/bin/" + i.binary}) {
		t.Errorf("programs %q", executables)
	}
	if got, want := digestOf(t, i.root+"/usr/bin/"+i.binary), digestOf(t, filepath.Join(dist(t), "linux-"+i.arch, i.binary)); got != want {
		t.Errorf("%s has the digest %s, that of dist %s", i.binary, got, want)
	}
	if third := read(t, i.root+"/licenses/THIRD-PARTY-LICENSES.txt"); !strings.Contains(third, map[string]string{"k8s-gpu": "k8s.io/kubelet v", "gpu-fleet": "k8s.io/client-go v"}[i.binary]) || !strings.Contains(read(t, i.root+"/licenses/LICENSE"), "Apache License") {
		t.Error("/licenses has not the licenses of what is linked")
	}
	if _, err := os.Stat(i.root + "/usr/share/doc/libc6/copyright"); err != nil {
		t.Errorf("the license of glibc: %v", err)
	}
	// What a node downloads and stores. The base has 2 to 6 MB, the binary 19 MB and 7 MB compressed.
	t.Logf("%s: %.1f MB to download, %.1f MB on disk", i.arch, float64(i.packed)/1e6, float64(size)/1e6)
	if i.packed > 16e6 || size > 50e6 {
		t.Errorf("%d bytes to download, %d on disk", i.packed, size)
	}
}
