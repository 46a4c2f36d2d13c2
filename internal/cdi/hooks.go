package cdi

import (
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/cdi/spec"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// The hooks that a specification of GPUs can have.
var (
	// basicHooks are those of every hook program that has CDI.
	basicHooks = []string{"create-symlinks", "update-ldcache"}

	// laterHooks were added to the hook program later. One that does not have a hook ends the container with an error, until version
	// 1.18, which ignores hooks that it does not have. 1.17.8 has neither the first nor the last of these.
	laterHooks = []string{"disable-device-node-modification", "enable-cuda-compat", "update-application-profile"}
)

const (
	allHooks = "all"

	// limitsHook is in specifications of NVIDIA's library since version 1.20.1. An earlier hook program ignores it, so that a container starts
	// without the limit that it asks for; one before 1.18 ends each container.
	limitsHook = "apply-cuda-memory-limits"
)

// noHooks reports whether the configuration leaves out all hooks without which a container does not find the driver's libraries.
func (o Options) noHooks() bool {
	return slices.Contains(o.DisabledHooks, allHooks) ||
		!slices.ContainsFunc(basicHooks, func(h string) bool { return !slices.Contains(o.DisabledHooks, h) })
}

// disabledHooks are the hooks to leave out for a hook program. A listed strategy gets every hook that is not configured otherwise, but
// for memory limits: only a program that is known to set them is called.
func (o Options) disabledHooks(h Hooks) []string {
	disabled := slices.Clone(o.DisabledHooks)
	if o.Auto && !AtLeast(h.Version, 1, 18, 0) {
		disabled = append(disabled, laterHooks...)
	}
	if !h.limits() {
		disabled = append(disabled, limitsHook)
	}
	slices.Sort(disabled)
	return slices.Compact(disabled)
}

// limits reports whether the hook program is known to set memory limits.
func (h Hooks) limits() bool { return AtLeast(h.Version, 1, 20, 1) }

// voidMount reports whether NVIDIA's container runtime, which is of the version of the hook program, is known to take a mount "void" for no device.
func (h Hooks) voidMount() bool { return AtLeast(h.Version, 1, 20, 2) }

// noLimits is why the memory limits that containers ask for have no effect, although the driver has them; "" if they have, if the
// driver has none, and if the configuration leaves the hook out.
func (o Options) noLimits(h Hooks, driver string) string {
	const effect = ": NVIDIA_GPU_MEMORY_LIMIT and NVIDIA_GPU_MEMORY_REQUEST of containers have no effect"
	switch {
	case number(driver, 0) < gpu.LimitsBranch || slices.Contains(o.DisabledHooks, limitsHook) || slices.Contains(o.DisabledHooks, allHooks):
	case !h.Found && h.Looked == "":
		return fmt.Sprintf("the version of hook program %s is not visible to this process%s", h.Path, effect)
	case !h.Found:
		return h.missing() + effect
	case h.Version == "":
		return fmt.Sprintf("the version of hook program %s is unknown%s", h.Path, effect)
	case !h.limits():
		return fmt.Sprintf("hook program %s has version %s, which sets no memory limits%s", h.Path, h.Version, effect)
	}
	return ""
}

// seen returns where this process sees a path of the host, "" if it doesn't.
func (o Options) seen(path string) string {
	if rest, ok := spec.Below(o.DriverRoot, path); ok {
		return resolve(o.ContainerRoot, rest)
	}
	if o.ContainerRoot == o.DriverRoot { // this process has the host's root
		return path
	}
	return ""
}

// sees reports whether this process sees the part of the host in which a path is. In a container it has only folders of the host's root that are
// mounted, such as /usr, and a link may lead out of them.
func (o Options) sees(path string) bool {
	rest, below := spec.Below(o.ContainerRoot, path)
	if o.ContainerRoot == o.DriverRoot || !below {
		return true
	}
	first, _, _ := strings.Cut(strings.TrimPrefix(rest, "/"), "/")
	_, err := os.Stat(spec.Join(o.ContainerRoot, first))
	return err == nil
}

// noStart is why no container with a device of the specification starts, because of its hooks; "" = nothing is known.
func (o Options) noStart(h Hooks) string {
	switch disabled := o.disabledHooks(h); {
	case h.None || h.Looked == "":
	case !h.Found:
		return h.missing() + ": install nvidia-container-toolkit, or name the program; no container with a device starts"
	case h.Version != "" && !AtLeast(h.Version, 1, 18, 0) && slices.ContainsFunc(laterHooks, func(hook string) bool { return !slices.Contains(disabled, hook) }):
		return fmt.Sprintf("hook program %s has version %s, which refuses hooks that it does not have: install 1.18 or later, or disable %s",
			h.Path, h.Version, strings.Join(laterHooks, ", "))
	}
	return ""
}

// resolve returns a path below a root without the links in it, of which absolute ones lead below the same root: the kernel would follow them in
// the root of this process.
func resolve(root, path string) string {
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		next := filepath.Join(at, rest[0])
		rest = rest[1:]
		target, err := os.Readlink(spec.Join(root, next))
		if err != nil || links == 16 { // links can be a loop
			at = next
			continue
		}
		if links++; filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return spec.Join(root, at)
}

// hookCache is the hook program as it was found last.
type hookCache struct {
	found   [2]programFile // the program, and the one beside a script
	version string
}

// programFile tells one content of a file from another.
type programFile struct {
	path     string
	modified syscall.Timespec
	inode    uint64
}

// statProgram returns the file that is at a path; one without an inode if there is none.
func statProgram(path string) programFile {
	p := programFile{path: path}
	if info, err := os.Stat(path); err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			p.modified, p.inode = st.Mtim, st.Ino
		}
	}
	return p
}

// look looks for the hook program on the host. It reads the version again only if a file has changed.
func (c *hookCache) look(o Options) Hooks {
	h := Hooks{None: o.noHooks(), Path: o.HookPath, Looked: o.seen(o.HookPath)}
	if h.Looked == "" {
		return h
	}
	info, err := os.Stat(h.Looked)
	if err != nil && !o.sees(h.Looked) {
		h.Looked = ""
	}
	if err != nil || info.IsDir() || info.Mode().Perm()&0o111 == 0 {
		return h
	}
	h.Found = true
	if now := [2]programFile{statProgram(h.Looked), statProgram(h.Looked + besideScript)}; c.found != now {
		c.found, c.version = now, ToolkitVersion(h.Looked)
	}
	h.Version = c.version
	return h
}

// besideScript ends the name of the program where the GPU operator puts a script at the path of the program itself.
const besideScript = ".real"

// linkedVersion is the version in the linker's flags of NVIDIA's build.
var linkedVersion = regexp.MustCompile(`internal/info\.version=v?([0-9]+\.[0-9]+[0-9A-Za-z.+-]*)`)

// ToolkitVersion is the version of a hook program, nvidia-ctk or nvidia-cdi-hook, read from the build information in the file: to run a program of the host is
// neither possible in a container nor safe. It is "" if the file does not have it.
func ToolkitVersion(path string) string {
	for _, file := range []string{path, path + besideScript} {
		info, err := buildinfo.ReadFile(file)
		if err != nil {
			continue
		}
		for _, s := range info.Settings {
			if m := linkedVersion.FindStringSubmatch(s.Value); s.Key == "-ldflags" && m != nil {
				return m[1]
			}
		}
		if v := strings.TrimPrefix(info.Main.Version, "v"); v != "" && v[0] >= '0' && v[0] <= '9' && !strings.HasPrefix(v, "0.0.0-") {
			return v
		}
	}
	return ""
}
