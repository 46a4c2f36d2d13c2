// Package binaries builds nomad-gpu and k8s-gpu for the tests of all packages, with the flags of "make build".
package binaries

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

// Version is that of the built agents.
const Version = "2.0.0"

// Flags are those of "go build"; the Makefile has the same.
func Flags() []string {
	return []string{
		"-trimpath", "-buildvcs=false", "-tags", "grpcnotrace,urfave_cli_no_template,nethttpomithttp2", "-ldflags", "-s -w -X main.version=" + Version,
	}
}

// Dir returns the folder with the built agents. It is in the user's cache directory, one for each working tree: go build
// replaces a binary there only if its sources have changed, and a process that runs keeps the old one. Test processes
// that build at the same time wait for each other.
var Dir = sync.OnceValues(func() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		cache = os.TempDir()
	}
	key := sha256.Sum256([]byte(root))
	dir := filepath.Join(cache, "tandem-binaries", hex.EncodeToString(key[:8]))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	build := exec.Command("go", append(append([]string{"build"}, Flags()...), "-o", dir+"/", "./cmd/nomad-gpu", "./cmd/k8s-gpu")...)
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return dir, nil
})

// Path returns the path of a built agent. It opens all folders with sources, because "go test" takes a result from its cache if
// what the tests have opened, after TestMain, has not changed: the sources of a program that a test builds are not part of that.
func Path(t testing.TB, program string) string {
	t.Helper()
	dir, err := Dir()
	if err != nil {
		t.Fatal(err)
	}
	root, err := moduleRoot()
	for _, sources := range []string{"cmd", "internal"} {
		if err == nil {
			err = filepath.WalkDir(filepath.Join(root, sources), func(_ string, _ fs.DirEntry, err error) error { return err })
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, program)
}

// moduleRoot is the nearest folder above the working directory, which for a test is that of its package, with a go.mod.
func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		} else if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod above the working directory")
		}
		dir = parent
	}
	return "", err
}
