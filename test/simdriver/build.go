package simdriver

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// LibraryName is the library's file name and soname, NVIDIA's own.
const LibraryName = "libnvidia-ml.so.1"

//go:embed lib/*.c lib/*.h lib/keys.def
var sources embed.FS

// ErrNoCompiler says that this machine has no C compiler to build the library with.
var ErrNoCompiler = errors.New("no C compiler (cc) found")

type buildOptions struct {
	without []string
	header  string
}

// BuildOption changes what Build makes.
type BuildOption func(*buildOptions)

// WithoutSymbols leaves exported functions out, as an older driver does. Names
// are exact, versions included: "nvmlEventSetWait_v2".
func WithoutSymbols(names ...string) BuildOption {
	return func(o *buildOptions) { o.without = append(o.without, names...) }
}

// WithHeader names the folder that holds NVIDIA's nvml.h. By default it is
// go-nvml's, found through the module of the working directory.
func WithHeader(dir string) BuildOption {
	return func(o *buildOptions) { o.header = dir }
}

// Build puts the library into dir and returns its path. The compiled library is
// cached by content in the user's cache folder, so a second build costs a copy.
func Build(ctx context.Context, dir string, opts ...BuildOption) (string, error) {
	cached, err := buildCached(ctx, opts...)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	path := filepath.Join(dir, LibraryName)
	if err := linkOrCopy(cached, path); err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	return path, nil
}

// buildCached compiles unless the very same library was compiled before.
func buildCached(ctx context.Context, opts ...BuildOption) (string, error) {
	var o buildOptions
	for _, opt := range opts {
		opt(&o)
	}
	slices.Sort(o.without)
	cc, err := exec.LookPath("cc")
	if err != nil {
		return "", ErrNoCompiler
	}
	if o.header == "" {
		if o.header, err = headerDir(ctx); err != nil {
			return "", err
		}
	}
	key, err := o.key()
	if err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	home := filepath.Join(cache, "tandem-simdriver")
	path := filepath.Join(home, key, LibraryName)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(home, 0o755); err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	work, err := os.MkdirTemp(home, "build-")
	if err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := compile(ctx, cc, work, o); err != nil {
		return "", err
	}
	// Two processes may have built at once: the first rename wins, both are right.
	if err := os.Rename(filepath.Join(work, "out"), filepath.Dir(path)); err != nil && !errors.Is(err, fs.ErrExist) {
		if _, there := os.Stat(path); there != nil {
			return "", fmt.Errorf("build library: %w", err)
		}
	}
	return path, nil
}

// key names the library by everything that goes into it.
func (o buildOptions) key() (string, error) {
	h := sha256.New()
	header, err := os.ReadFile(filepath.Join(o.header, "nvml.h"))
	if err != nil {
		return "", err
	}
	h.Write(header)
	err = fs.WalkDir(sources, "lib", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := sources.ReadFile(path)
		h.Write(fmt.Appendf(nil, "%s %d\n", path, len(text)))
		h.Write(text)
		return err
	})
	h.Write(fmt.Appendln(nil, o.without))
	return hex.EncodeToString(h.Sum(nil))[:16], err
}

func compile(ctx context.Context, cc, work string, o buildOptions) error {
	if err := os.CopyFS(work, sources); err != nil {
		return fmt.Errorf("build library: %w", err)
	}
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return fmt.Errorf("build library: %w", err)
	}
	// An exact name wins over a pattern, so that a symbol can be withheld.
	script := "{ global: nvml*; local: *;"
	for _, name := range o.without {
		script += " " + name + ";"
	}
	symbols := filepath.Join(work, "symbols.map")
	if err := os.WriteFile(symbols, []byte(script+" };\n"), 0o644); err != nil {
		return fmt.Errorf("build library: %w", err)
	}
	files, err := filepath.Glob(filepath.Join(work, "lib", "*.c"))
	if err != nil {
		return fmt.Errorf("build library: %w", err)
	}
	args := []string{"-std=gnu11", "-Wall", "-Wextra", "-Wno-deprecated-declarations", "-O2", "-g", "-shared", "-fPIC",
		"-Wl,-soname," + LibraryName, "-Wl,--version-script=" + symbols, "-I" + o.header,
		"-o", filepath.Join(out, LibraryName)}
	args = append(append(args, files...), "-lpthread", "-ldl")
	if text, err := exec.CommandContext(ctx, cc, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("build library: %w\n%s", err, text)
	}
	return nil
}

// headerDir is where go-nvml keeps the nvml.h that its bindings were made from.
func headerDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find nvml.h: go list: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml"), nil
}

// linkOrCopy replaces to with from's content. A hard link keeps a process that
// has the old file mapped safe, as does the rename.
func linkOrCopy(from, to string) error {
	temp := to + ".new"
	_ = os.Remove(temp)
	if os.Link(from, temp) != nil {
		text, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(temp, text, 0o755); err != nil {
			return err
		}
	}
	if err := os.Rename(temp, to); err != nil {
		return err
	}
	_ = os.Remove(temp) // rename leaves both names when they are one file already
	return nil
}
