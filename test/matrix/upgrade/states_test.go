//go:build matrix

package upgrade

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

const repository = "../../.."

// state is a former state of this repository: a commit after which something on disk changed, or a part was complete.
type state struct {
	Name   string   `json:"name"` // the proposed tag is state-NAME
	Commit string   `json:"commit"`
	Date   string   `json:"date"`
	Why    string   `json:"why"`
	Lacks  []string `json:"lacks"` // settings that its agents do not have, and the files "bindings" (of numbers) and "handed-out"
}

func (s state) has(setting string) bool { return !slices.Contains(s.Lacks, setting) }

// states reads states.json.
func states(t *testing.T) (all []state) {
	t.Helper()
	text, err := os.ReadFile("states.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	return all
}

// errShallow is returned for a commit that the clone does not have.
var errShallow = errors.New("is not in this clone: git fetch --unshallow gets it")

// build returns the folder of both agents as they were, which are built once.
func (s state) build(t *testing.T) (string, error) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(cache, "tandem-upgrade", s.Commit)
	if _, err := os.Stat(bin); err == nil {
		return bin, nil
	}
	if exec.Command("git", "-C", repository, "cat-file", "-e", s.Commit+"^{commit}").Run() != nil {
		return "", fmt.Errorf("state %s: commit %.12s %w", s.Name, s.Commit, errShallow)
	}
	source := t.TempDir()
	const unpack = `set -euo pipefail; git -C "$1" archive "$2" cmd internal go.mod go.sum | tar -x -C "$3"`
	run(t, exec.Command("bash", "-c", unpack, "bash", repository, s.Commit, source))
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+s.Name, "-o", bin+".part/", "./cmd/...")
	build.Dir = source
	build.Env = append(os.Environ(), "CGO_ENABLED=1", "CGO_CFLAGS=-Wno-deprecated-declarations")
	run(t, build)
	if err := os.Rename(bin+".part", bin); err != nil {
		t.Fatal(err)
	}
	return bin, nil
}

func run(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
}
