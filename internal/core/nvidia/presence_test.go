package nvidia_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/nvidia"
)

func TestPresence(t *testing.T) {
	root := t.TempDir()
	roots := core.Roots{Driver: root, Dev: root, Sys: filepath.Join(root, "sys"), Proc: filepath.Join(root, "proc")}
	seen := map[string]string{}
	step := func(what string) {
		t.Helper()
		now := nvidia.DriverFingerprint(roots)
		if before, ok := seen[now]; ok {
			t.Errorf("%s looks like %s: %q", what, before, now)
		}
		seen[now] = what
		if again := nvidia.DriverFingerprint(roots); again != now {
			t.Errorf("%s: %q, then %q", what, now, again)
		}
	}
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	step("nothing")
	put("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "")
	step("a library")
	put("sys/module/nvidia/version", "570.1\n")
	step("a module")
	put("sys/module/nvidia/version", "580.1\n")
	step("another module")
	put("dev/nvidiactl", "")
	step("its node")
}
