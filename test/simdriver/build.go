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

// controlName is the file name of the program of lib/control.
const controlName = "memacct"

//go:embed lib/*.c lib/*.h lib/keys.def lib/control/*.c
var sources embed.FS

// ErrNoCompiler means that this node has no C compiler to build the library with.
var ErrNoCompiler = errors.New("no C compiler (cc) found")

// Build writes the library into dir and returns its path. The compiled library is cached by content in the user's cache folder, so
// that another build is a copy.
func Build(ctx context.Context, dir string) (path string, err error) {
	cached, err := buildCached(ctx)
	if err == nil {
		path = filepath.Join(dir, LibraryName)
		err = errors.Join(os.MkdirAll(dir, 0o755), linkOrCopy(cached, path))
	}
	if err != nil {
		return "", fmt.Errorf("build library: %w", err)
	}
	return path, nil
}

// buildCached compiles the library unless the same one was compiled before.
func buildCached(ctx context.Context) (string, error) {
	header, err := headerDir(ctx)
	if err != nil {
		return "", err
	}
	key, err := cacheKey(header)
	if err != nil {
		return "", err
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
		return "", err
	}
	work, err := os.MkdirTemp(home, "build-")
	if err != nil {
		return "", err
	}
	defer func() { _ = os.RemoveAll(work) }()
	out, err := compile(ctx, work, header)
	if err != nil {
		return "", err
	}
	// Of two processes that build at once the first rename succeeds; both have the same library.
	if err := os.Rename(out, filepath.Dir(path)); err != nil {
		if _, missing := os.Stat(path); missing != nil {
			return "", err
		}
	}
	return path, nil
}

// cacheKey is a hash of everything that goes into a library.
func cacheKey(headerDir string) (string, error) {
	h := sha256.New()
	header, err := os.ReadFile(filepath.Join(headerDir, "nvml.h"))
	if err != nil {
		return "", err
	}
	h.Write(header)
	h.Write(fmt.Append(nil, flags, libraryFlags))
	err = fs.WalkDir(sources, "lib", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := sources.ReadFile(path)
		h.Write(fmt.Appendf(nil, "%s %d\n", path, len(text)))
		h.Write(text)
		return err
	})
	return hex.EncodeToString(h.Sum(nil))[:16], err
}

// flags are the compiler's. With frame pointers a profile shows who called the library.
var (
	flags        = []string{"-std=gnu11", "-Wall", "-Wextra", "-Wno-deprecated-declarations", "-O2", "-g", "-fno-omit-frame-pointer"}
	libraryFlags = []string{"-shared", "-fPIC", "-Wl,-soname," + LibraryName}
)

// compile compiles the library and the program of lib/control in a work folder, and returns the folder of both.
func compile(ctx context.Context, work, header string) (string, error) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		return "", ErrNoCompiler
	}
	if err := os.CopyFS(work, sources); err != nil {
		return "", err
	}
	out := filepath.Join(work, "out")
	if err := os.Mkdir(out, 0o755); err != nil {
		return "", err
	}
	symbols := filepath.Join(work, "symbols.map")
	if err := os.WriteFile(symbols, []byte("{ global: nvml*; local: *; };\n"), 0o644); err != nil {
		return "", err
	}
	files, err := filepath.Glob(filepath.Join(work, "lib", "*.c"))
	if err != nil {
		return "", err
	}
	build := func(name string, files []string, more ...string) error {
		args := slices.Concat(flags, more, []string{"-I" + header, "-o", filepath.Join(out, name)}, files, []string{"-lpthread", "-ldl"})
		if text, err := exec.CommandContext(ctx, cc, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%w\n%s", err, text)
		}
		return nil
	}
	if err := build(LibraryName, files, append(slices.Clone(libraryFlags), "-Wl,--version-script="+symbols)...); err != nil {
		return "", err
	}
	if err := build(controlName, append(limitFiles(work), filepath.Join(work, "lib/control/main.c"))); err != nil {
		return "", err
	}
	return out, nil
}

// limitFiles are the files of the rules of memacct.c in a folder with the sources.
func limitFiles(dir string) []string {
	var files []string
	for _, name := range []string{"memacct.c", "cgroups.c", "dmem.c", "machine.c"} {
		files = append(files, filepath.Join(dir, "lib", name))
	}
	return files
}

// LimitSources writes the sources into a folder. It returns the arguments of a compiler for a program that charges allocations by the rules of memacct.c.
func LimitSources(ctx context.Context, dir string) (arguments []string, err error) {
	header, err := headerDir(ctx)
	if err != nil {
		return nil, err
	}
	return append(limitFiles(dir), "-I"+filepath.Join(dir, "lib"), "-I"+header, "-lpthread", "-ldl"), os.CopyFS(dir, sources)
}

// headerDir is the folder of go-nvml with the nvml.h of its bindings.
func headerDir(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		return "", fmt.Errorf("find nvml.h: go list: %w", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "pkg", "nvml"), nil
}

// linkOrCopy replaces a file by a link or copy of another. A process that has the old file mapped keeps it.
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
