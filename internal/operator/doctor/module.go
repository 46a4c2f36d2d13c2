package doctor

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// module is what is known of NVIDIA's kernel module, loaded or not.
type module struct {
	Loaded      bool
	Version     string   // of the loaded one
	Nouveau     bool     // nouveau is loaded
	Release     string   // of the running kernel; "" = unknown
	Installed   bool     // for the running kernel
	Others      []string // kernel releases for which it is installed, if not for the running one
	Seen        bool     // the folder of modules of the running kernel is visible
	Blacklisted string   // file and line of modprobe.d that keeps it from being loaded; "" = none
	SecureBoot  bool
}

// secureBoot is the variable of the UEFI specification, with the GUID of global variables.
const secureBoot = "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

var versionInText = regexp.MustCompile(`[0-9]+\.[0-9]+(\.[0-9]+)?`)

func readModule(_ context.Context, o *Options) func(*Facts) {
	m := module{
		Loaded: exists(o.sys("module/nvidia")) || exists(o.proc("driver/nvidia/version")), Nouveau: exists(o.sys("module/nouveau")),
		Release: text(o.proc("sys/kernel/osrelease")), Version: text(o.sys("module/nvidia/version")),
	}
	if m.Version == "" {
		first, _, _ := strings.Cut(text(o.proc("driver/nvidia/version")), "\n")
		m.Version = versionInText.FindString(first)
	}
	if b, err := os.ReadFile(o.sys(secureBoot)); err == nil && len(b) == 5 { // four bytes of attributes, then the value
		m.SecureBoot = b[4] == 1
	}
	if !m.Loaded {
		m.readInstalled(o)
		m.Blacklisted = blacklisted(o)
	}
	return func(f *Facts) { f.Module = m }
}

// readInstalled searches the modules of the kernels of the node.
func (m *module) readInstalled(o *Options) {
	folders, _ := filepath.Glob(o.host("/lib/modules/*"))
	for _, folder := range folders {
		release := filepath.Base(folder)
		has := false
		if f, err := os.Open(filepath.Join(folder, "modules.dep")); err == nil {
			for lines := bufio.NewScanner(f); lines.Scan(); {
				path, _, _ := strings.Cut(lines.Text(), ":")
				name, _, _ := strings.Cut(filepath.Base(path), ".")
				has = has || name == "nvidia"
			}
			_ = f.Close()
		}
		switch {
		case release == m.Release:
			m.Seen, m.Installed = true, has
		case has:
			m.Others = append(m.Others, release)
		}
	}
}

// blacklisted returns the line of modprobe.d that disables the module.
func blacklisted(o *Options) string {
	for _, folder := range []string{"/etc/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d", "/run/modprobe.d"} {
		files, _ := filepath.Glob(o.host(folder + "/*.conf"))
		for _, file := range files {
			for line := range strings.Lines(text(file)) {
				words := strings.Fields(line)
				if slices.Equal(words, []string{"blacklist", "nvidia"}) || len(words) > 2 && words[0] == "install" && words[1] == "nvidia" && strings.HasSuffix(words[2], "/false") {
					return filepath.Join(folder, filepath.Base(file)) + ": " + strings.TrimSpace(line)
				}
			}
		}
	}
	return ""
}

func decideModule(c *chain) []Finding {
	f := c.Facts
	m := f.Module
	place := f.sys("module/nvidia")
	reason := f.Driver.Driver.Reason
	switch {
	case !m.Loaded && f.Driver.Driver.State == "ready":
		return []Finding{{"module", Note, place, "not visible from here; the driver answers", ""}}
	case !m.Loaded:
		found, remedy := m.whyNotLoaded(f)
		return c.broken(Finding{"module", Problem, place, found, remedy})
	case f.Driver.Driver.State == "failed" && (strings.Contains(reason, "different versions") || strings.Contains(reason, "version mismatch")):
		found := reason
		if v := f.Library.version(); v != "" && m.Version != "" {
			found = fmt.Sprintf("the kernel module is %s, the library %s: the driver was upgraded, and the old module is still loaded", m.Version, v)
			place += "/version, " + f.Library.Files[0].Path
		}
		return c.broken(Finding{"module", Problem, place, found,
			fmt.Sprintf("drain the node and reboot; or end all GPU work, then: %s quiesce; modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia; modprobe nvidia; %[1]s resume", f.Program)})
	}
	return []Finding{{"module", OK, place, strings.TrimSpace("nvidia " + m.Version), ""}}
}

func (m module) whyNotLoaded(f *Facts) (found, remedy string) {
	switch {
	case m.Nouveau:
		return "nouveau is loaded in place of the module nvidia",
			"echo 'blacklist nouveau' > /etc/modprobe.d/blacklist-nouveau.conf, build the initramfs again (update-initramfs -u or dracut -f), and reboot"
	case m.Blacklisted != "":
		return "the module nvidia is not loaded: " + m.Blacklisted, "remove that line, then: modprobe nvidia"
	case m.Seen && !m.Installed && len(m.Others) > 0:
		return fmt.Sprintf("the module nvidia is not built for the running kernel %s, only for %s", m.Release, list(m.Others)),
			fmt.Sprintf("install linux-headers-%s and run: dkms autoinstall -k %[1]s && modprobe nvidia", m.Release)
	case m.Seen && !m.Installed:
		return "the module nvidia is not installed for the running kernel " + m.Release,
			"install the driver's kernel module (nvidia-dkms or nvidia-open), then: modprobe nvidia"
	case m.SecureBoot && f.kernelLine(refused) != "":
		return "Secure Boot refuses the module nvidia: " + f.kernelLine(refused), signModule
	case m.SecureBoot:
		return "the module nvidia is installed and not loaded; Secure Boot is on, and refuses a module that is not signed", signModule
	}
	found = "the module nvidia is not loaded"
	if line := f.kernelLine(aboutModule); line != "" {
		found += "; kernel log: " + line
	}
	return found, "modprobe nvidia; if that fails, the reason is in dmesg" + remedyInContainer(f, " (on the host)")
}

const signModule = "sign the module and enrol the key (mokutil --import, reboot), install the distribution's signed packages, or switch Secure Boot off"

// Patterns of the kernel's log: kernel/module/main.c and signing.c, security/lockdown, NVIDIA's nv.c.
var (
	refused     = regexp.MustCompile(`Loading of (unsigned module|module with unavailable key) is rejected|Lockdown: .*unsigned module|Key was rejected`)
	aboutModule = regexp.MustCompile(`NVRM: |nvidia: (version magic|disagrees|Unknown symbol)|nvidia: module`)
)

// kernelLine is the latest line of the kernel log that matches; "" if there is none.
func (f *Facts) kernelLine(pattern *regexp.Regexp) string {
	for _, line := range slices.Backward(f.Kernel) {
		if pattern.MatchString(line) {
			return line
		}
	}
	return ""
}
