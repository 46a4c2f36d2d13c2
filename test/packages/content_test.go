//go:build packages

package packages

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	version  = flag.String("version", "", "version of the packages")
	packages = flag.String("packages", "", "folder with the packages, those of this machine's architecture at least")
	debian   = flag.String("debian", "", "root file system of a Debian with systemd")
)

// architectures are the names of an architecture of Go.
var architectures = map[string]struct{ deb, rpm string }{"amd64": {"amd64", "x86_64"}, "arm64": {"arm64", "aarch64"}}

func debFile(folder, name, version, arch string) string {
	return filepath.Join(folder, fmt.Sprintf("%s_%s-1_%s.deb", name, version, architectures[arch].deb))
}

func rpmFile(folder, name, version, arch string) string {
	return filepath.Join(folder, fmt.Sprintf("%s-%s-1.%s.rpm", name, version, architectures[arch].rpm))
}

// run returns the output of a command that must succeed.
func run(t *testing.T, argv ...string) string {
	t.Helper()
	out, err := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

// shipped is what a package has, in the terms of both formats.
type shipped struct {
	name, binary, service string
	files                 map[string]string // by path: mode and owner, and what a link points to; not what one format alone has
	config                string
	deb, rpm              map[string]string // dependencies
	scripts               map[string]string // by format
}

// all are the packages. Folders are not compared but for their modes.
var all = []shipped{
	{
		name: "tandem-nomad-gpu", binary: "nomad-gpu", config: "/etc/nomad.d/nomad-gpu.hcl", service: "systemd/system/nomad-gpu-mps-daemon.service",
		files: map[string]string{
			"/usr/bin/nomad-gpu":                "-rwxr-xr-x root root",
			"/etc/nomad.d/nomad-gpu.hcl":        "-rw-r--r-- root root",
			"/opt/nomad/data/plugins/nomad-gpu": "link /usr/bin/nomad-gpu",
		},
		deb:     map[string]string{"Depends": "libc6 (>= 2.34)", "Recommends": "nomad", "Suggests": ""},
		rpm:     map[string]string{"requires": "libc.so.6(GLIBC_2.34)(64bit)", "recommends": "nomad", "suggests": ""},
		scripts: map[string]string{"deb": "postinst postrm prerm", "rpm": "postinstall posttrans postuninstall preuninstall"},
	},
	{
		name: "tandem-k8s-gpu", binary: "k8s-gpu", config: "/etc/default/k8s-gpu", service: "systemd/system/k8s-gpu.service",
		files: map[string]string{
			"/usr/bin/k8s-gpu":     "-rwxr-xr-x root root",
			"/etc/default/k8s-gpu": "-rw-r--r-- root root",
		},
		deb:     map[string]string{"Depends": "libc6 (>= 2.34)", "Recommends": "", "Suggests": "kubelet"},
		rpm:     map[string]string{"requires": "libc.so.6(GLIBC_2.34)(64bit)", "recommends": "", "suggests": "kubelet"},
		scripts: map[string]string{"deb": "postinst postrm prerm", "rpm": "postinstall postuninstall preuninstall"},
	},
	{
		name: "tandem-gpu-fleet", binary: "gpu-fleet", config: "/etc/gpu-fleet/gpu-fleet.yaml", service: "systemd/system/gpu-fleet.service",
		files: map[string]string{
			"/usr/bin/gpu-fleet":                 "-rwxr-xr-x root root",
			"/etc/gpu-fleet/gpu-fleet.yaml":      "-rw-r--r-- root root",
			"/usr/lib/sysusers.d/gpu-fleet.conf": "-rw-r--r-- root root",
		},
		deb:     map[string]string{"Depends": "systemd | systemd-standalone-sysusers | systemd-sysusers", "Recommends": "", "Suggests": ""},
		rpm:     map[string]string{"requires": "", "recommends": "", "suggests": ""},
		scripts: map[string]string{"deb": "postinst postrm prerm", "rpm": "postinstall postuninstall preuninstall"},
	},
}

// wanted are the files of the package in a format.
func (s shipped) wanted(format string) map[string]string {
	files := maps.Clone(s.files)
	docs := []string{"changelog.gz", "linked-licenses.gz"}
	systemd := "/lib/"
	if format == "deb" {
		docs = append(docs, "copyright", "changelog.Debian.gz")
		files["/usr/share/lintian/overrides/"+s.name] = "-rw-r--r-- root root"
	} else {
		docs, systemd = append(docs, "LICENSE"), "/usr/lib/"
	}
	for _, doc := range docs {
		files["/usr/share/doc/"+s.name+"/"+doc] = "-rw-r--r-- root root"
	}
	files["/usr/share/man/man8/"+s.binary+".8.gz"] = "-rw-r--r-- root root"
	if s.service != "" {
		files[systemd+s.service] = "-rw-r--r-- root root"
	}
	return files
}

// eachArch calls check for every architecture of which there are packages: that of this machine at least.
func eachArch(t *testing.T, check func(t *testing.T, s shipped, arch string)) {
	for _, s := range all {
		for _, arch := range slices.Sorted(maps.Keys(architectures)) {
			if _, err := os.Stat(debFile(*packages, s.name, *version, arch)); err != nil && arch != runtime.GOARCH {
				continue
			}
			t.Run(s.name+"-"+arch, func(t *testing.T) { check(t, s, arch) })
		}
	}
}

func TestDebs(t *testing.T) {
	eachArch(t, func(t *testing.T, s shipped, arch string) {
		file := debFile(*packages, s.name, *version, arch)
		got := map[string]string{}
		for line := range strings.Lines(run(t, "dpkg-deb", "--contents", file)) {
			f := strings.Fields(line) // mode owner/group size date time ./path [-> target]
			mode, owner, path := f[0], strings.Replace(f[1], "/", " ", 1), strings.TrimPrefix(f[5], ".")
			switch mode[0] {
			case 'd':
				if mode != "drwxr-xr-x" || owner != "root root" {
					t.Errorf("%s is %s %s", path, mode, owner)
				}
			case 'l':
				got[path] = "link " + f[7]
			default:
				got[path] = mode + " " + owner
			}
		}
		if diff := cmp.Diff(s.wanted("deb"), got); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
		fields := map[string]string{"Version": *version + "-1", "Architecture": architectures[arch].deb, "Section": "admin", "Priority": "optional"}
		maps.Copy(fields, s.deb)
		for name, want := range fields {
			if value := run(t, "dpkg-deb", "--field", file, name); value != want {
				t.Errorf("%s: %q, want %q", name, value, want)
			}
		}
		control := t.TempDir()
		run(t, "dpkg-deb", "--control", file, control)
		if text, err := os.ReadFile(control + "/conffiles"); err != nil || strings.TrimSpace(string(text)) != s.config {
			t.Errorf("conffiles: %q, %v; want %s", text, err, s.config)
		}
		var scripts []string
		for _, name := range []string{"config", "postinst", "postrm", "preinst", "prerm"} {
			if info, err := os.Stat(filepath.Join(control, name)); err == nil {
				scripts = append(scripts, name)
				if info.Mode().Perm() != 0o755 {
					t.Errorf("%s is %v", name, info.Mode())
				}
			}
		}
		if got := strings.Join(scripts, " "); got != s.scripts["deb"] {
			t.Errorf("scripts %q, want %q", got, s.scripts["deb"])
		}
	})
}

func TestRPMs(t *testing.T) {
	eachArch(t, func(t *testing.T, s shipped, arch string) {
		file := rpmFile(*packages, s.name, *version, arch)
		query := func(format string) string {
			return run(t, "rpm", "-qp", "--nosignature", "--queryformat", format, file)
		}
		got := map[string]string{}
		for line := range strings.Lines(query(`[%{FILEMODES:perms} %{FILEUSERNAME} %{FILEGROUPNAME} %{FILENAMES} %{FILELINKTOS}\n]`)) {
			f := strings.Fields(line)
			switch f[0][0] {
			case 'd':
				t.Errorf("the package has the folder %s, which others use", f[3])
			case 'l':
				got[f[3]] = "link " + f[4]
			default:
				got[f[3]] = strings.Join(f[:3], " ")
			}
		}
		if diff := cmp.Diff(s.wanted("rpm"), got); diff != "" {
			t.Errorf("files (-want +got):\n%s", diff)
		}
		for query, want := range s.rpm {
			if got := run(t, "rpm", "-qp", "--nosignature", "--"+query, file); got != want {
				t.Errorf("%s: %q, want %q", query, got, want)
			}
		}
		if got, want := query(`%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{OS} %{BUILDHOST}`), fmt.Sprintf("%s %s 1 %s linux localhost", s.name, *version, architectures[arch].rpm); got != want {
			t.Errorf("%q, want %q", got, want)
		}
		flags := query(`[%{FILENAMES}=%{FILEFLAGS:fflags}\n]`)
		for _, want := range []string{s.config + "=cn", "/usr/share/doc/" + s.name + "/LICENSE=l", "/usr/share/doc/" + s.name + "/linked-licenses.gz=l"} {
			if !slices.Contains(strings.Split(flags, "\n"), want) {
				t.Errorf("no %s in\n%s", want, flags)
			}
		}
		var scripts []string
		for line := range strings.Lines(run(t, "rpm", "-qp", "--nosignature", "--scripts", file)) {
			if name, _, ok := strings.Cut(line, " scriptlet (using /bin/sh)"); ok {
				scripts = append(scripts, name)
			}
		}
		slices.Sort(scripts)
		if got := strings.Join(scripts, " "); got != s.scripts["rpm"] {
			t.Errorf("scripts %q, want %q", got, s.scripts["rpm"])
		}
	})
}
