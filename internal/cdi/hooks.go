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
)

// The hooks that a specification of GPUs can have.
var (
	// basicHooks are those of every hook program that has CDI.
	basicHooks = []string{"create-symlinks", "update-ldcache"}

	// laterHooks were added to the hook program later. One that does not have a hook ends the container with an error, until version
	// 1.18, which ignores hooks that it does not have. 1.17.8 has neither the first nor the last of these.
	laterHooks = []string{"disable-device-node-modification", "enable-cuda-compat", "update-application-profile"}
)

const allHooks = "all"

// noHooks reports whether the configuration leaves out all hooks without which a container does not find the driver's libraries.
func (o Options) noHooks() bool {
	return slices.Contains(o.DisabledHooks, allHooks) ||
		!slices.ContainsFunc(basicHooks, func(h string) bool { return !slices.Contains(o.DisabledHooks, h) })
}

// disabledHooks are the hooks to leave out for a hook program. A listed strategy gets every hook that is not configured otherwise.
func (o Options) disabledHooks(h Hooks) []string {
	disabled := slices.Clone(o.DisabledHooks)
	if o.Auto && !atLeast(h.Version, 1, 18) {
		disabled = append(disabled, laterHooks...)
	}
	slices.Sort(disabled)
	return slices.Compact(disabled)
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
	case h.Version != "" && !atLeast(h.Version, 1, 18) && slices.ContainsFunc(laterHooks, func(hook string) bool { return !slices.Contains(disabled, hook) }):
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
	path     string
	modified syscall.Timespec
	inode    uint64
	version  string
}

// look looks for the hook program on the host. It reads the version again only if the file has changed.
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
	if st, ok := info.Sys().(*syscall.Stat_t); ok && (c.path != h.Looked || c.modified != st.Mtim || c.inode != st.Ino) {
		c.path, c.modified, c.inode, c.version = h.Looked, st.Mtim, st.Ino, ToolkitVersion(h.Looked)
	}
	h.Version = c.version
	return h
}

// linkedVersion is the version in the linker's flags of NVIDIA's build.
var linkedVersion = regexp.MustCompile(`internal/info\.version=v?([0-9]+\.[0-9]+[0-9A-Za-z.+-]*)`)

// ToolkitVersion is the version of a hook program, nvidia-ctk or nvidia-cdi-hook, read from the build information in the file: to run a program of the host is
// neither possible in a container nor safe. The GPU operator puts a script at the path, and the program beside it. It is "" if
// the file does not have it.
func ToolkitVersion(path string) string {
	for _, file := range []string{path, path + ".real"} {
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
