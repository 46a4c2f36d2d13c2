package walls

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// No large file is tracked: what a build makes is in bin/ and dist/, which git ignores.
func TestNoLargeFileIsTracked(t *testing.T) {
	const root, most = "../../", 1 << 20 // bytes
	cmd := exec.Command("git", "ls-files", "-z")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Skipf("not in a git checkout: %v", err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if info, err := os.Lstat(root + name); err == nil && info.Size() > most {
			t.Errorf("%s has %d bytes, more than %d", name, info.Size(), most)
		}
	}
}
