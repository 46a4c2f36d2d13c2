package nvidia

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// create makes empty files in place of device nodes.
func create(t testing.TB, paths ...string) {
	t.Helper()
	for _, p := range paths {
		must(t, os.MkdirAll(filepath.Dir(p), 0o755), os.WriteFile(p, nil, 0o600))
	}
}

func TestNodesWithoutDriverCall(t *testing.T) {
	m := simdriver.Start(t, "a100-mig")
	s := open(t, m)
	first := snapshot(t, s).Nodes
	before := total(calls(t, m))
	for _, name := range []string{"nvidia-uvm", "nvidia-caps/nvidia-cap9999", "nvidia9"} {
		path, node := filepath.Join(m.Root, "dev", name), "/dev/"+name
		_ = os.Remove(path)                                 // some exist already
		for _, present := range []bool{true, false, true} { // in quick succession
			if present {
				create(t, path)
			} else {
				must(t, os.Remove(path))
			}
			if got := s.Nodes(); slices.Contains(got, node) != present || !slices.IsSorted(got) {
				t.Errorf("%s, present %t: %v", node, present, got)
			}
		}
	}
	must(t, os.Remove(filepath.Join(m.Root, "dev/nvidia9")), os.RemoveAll(filepath.Join(m.Root, "dev/nvidia-caps")))
	create(t, filepath.Join(m.Root, "dev/sda"))
	for _, node := range s.Nodes() {
		if !slices.Contains(first, node) || filepath.Dir(node) != "/dev" {
			t.Errorf("%s is listed", node)
		}
	}
	if n := total(calls(t, m)) - before; n != 0 {
		t.Errorf("%d driver calls", n)
	}
}

// The kernel's clock for modification times advances every 1 to 10 ms: a node that is created just after the folder was listed
// may not change the time.
func TestNodeWithinMTimeGranularity(t *testing.T) {
	root := t.TempDir()
	dev := os.DirFS(root)
	var l nodeList
	create(t, filepath.Join(root, "nvidia0"))
	mtime := time.Now()
	must(t, os.Chtimes(root, mtime, mtime))
	l.current(dev)
	create(t, filepath.Join(root, "nvidia-uvm"))
	must(t, os.Chtimes(root, mtime, mtime))
	if got := l.current(dev); len(got) != 2 {
		t.Errorf("got %v", got)
	}
	old := mtime.Add(-time.Hour)
	must(t, os.Chtimes(root, old, old))
	l.current(dev)
	create(t, filepath.Join(root, "nvidia1"))
	must(t, os.Chtimes(root, old, old)) // as on a file system without modification times of folders
	if got := l.current(dev); len(got) != 2 {
		t.Errorf("a folder with an old mtime was listed: %v", got)
	}
	if got := l.relist(dev); len(got) != 3 {
		t.Errorf("relisted: %v", got)
	}
}

// BenchmarkNodes lists /dev of a machine with eight GPUs and 400 other nodes, if nothing has changed (the monitor lists it twice
// a second) and if something has.
func BenchmarkNodes(b *testing.B) {
	root := b.TempDir()
	for i := range 400 {
		create(b, filepath.Join(root, fmt.Sprintf("other%d", i)))
	}
	for i := range 8 {
		create(b, filepath.Join(root, fmt.Sprintf("nvidia%d", i)), filepath.Join(root, fmt.Sprintf("nvidia-caps/nvidia-cap%d", i)))
	}
	create(b, filepath.Join(root, "nvidiactl"), filepath.Join(root, "nvidia-uvm"))
	old := time.Now().Add(-time.Hour)
	must(b, os.Chtimes(root, old, old), os.Chtimes(filepath.Join(root, "nvidia-caps"), old, old))
	dev := os.DirFS(root)
	b.Run("unchanged", func(b *testing.B) {
		var l nodeList
		b.ReportAllocs()
		for b.Loop() {
			l.current(dev)
		}
	})
	b.Run("changed", func(b *testing.B) {
		var l nodeList
		b.ReportAllocs()
		for b.Loop() {
			l.relist(dev)
		}
	})
}
