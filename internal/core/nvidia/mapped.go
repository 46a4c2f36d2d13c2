package nvidia

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core"
)

// mapped is the library whose functions this process calls: the first, for good. glibc binds the executable
// to the function that it finds first and never unloads what the executable is bound to; opened again by the
// same name it is the same library, whatever file has that name by then. Under another name another file would
// be mapped beside it: a look-up would ask the new one, a call would still go to the old one, or, for a function
// that only the new one has, to that. So only this library is ever asked what it has, and it is never closed.
var mapped struct {
	sync.Mutex
	library *library
}

// takeLibrary gives the library to call: the one that is mapped, else the one beneath root, which is mapped
// from then on. Where there is none on disk there is no driver, mapped or not.
func takeLibrary(root string) (*library, error) {
	mapped.Lock()
	defer mapped.Unlock()
	if l := mapped.library; l != nil {
		if l.now(root) == (disk{}) {
			return nil, noLibrary(l.folders(root))
		}
		return l, nil
	}
	l, err := findLibrary(root)
	if err != nil {
		return nil, err
	}
	mapped.library = l
	return l, nil
}

// disk is a library on disk; the zero value is none.
type disk struct {
	path string
	file file
}

// file tells one file from another that has its name later. A library that is mapped keeps its inode, so no
// other gets the number. A file without a link is one that was removed where it came from, but is still bound
// into this container: the next container gets another.
type file struct {
	device, inode  uint64
	size, modified int64
	linked         bool
}

func diskOf(path string) disk {
	info, err := os.Stat(path)
	if err != nil {
		return disk{}
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.IsDir() {
		return disk{}
	}
	return disk{path, file{stat.Dev, stat.Ino, stat.Size, info.ModTime().UnixNano(), stat.Nlink > 0}}
}

// version is the driver's, which is in the name of the file that libnvidia-ml.so.1 links to; else the path.
func (d disk) version() string {
	if path, err := filepath.EvalSymlinks(d.path); err == nil {
		if v, ok := strings.CutPrefix(filepath.Base(path), "libnvidia-ml.so."); ok && strings.Contains(v, ".") {
			return v
		}
	}
	return d.path
}

// mappedPath is where the library is that was just opened by its name alone.
func mappedPath() string {
	text, _ := os.ReadFile("/proc/self/maps")
	for line := range strings.Lines(string(text)) {
		at := strings.IndexByte(line, '/')
		if at < 0 {
			continue
		}
		path := strings.TrimSuffix(strings.TrimSpace(line[at:]), " (deleted)")
		if strings.HasPrefix(filepath.Base(path), "libnvidia-ml.so") {
			return path
		}
	}
	return ""
}

// folders are where a new process would look, as far as this one knows: for the dynamic linker that is its
// environment and where the mapped one was.
func (l *library) folders(root string) []string {
	root = filepath.Join("/", root)
	var folders []string
	if root == "/" {
		folders = filepath.SplitList(os.Getenv("LD_LIBRARY_PATH"))
		if l.path == libraryName && l.disk.path != "" {
			folders = append(folders, filepath.Dir(l.disk.path))
		}
	}
	for _, folder := range libraryFolders {
		folders = append(folders, filepath.Join(root, folder))
	}
	return folders
}

// now is the library that a new process would open.
func (l *library) now(root string) disk {
	for _, folder := range l.folders(root) {
		if d := diskOf(filepath.Join(folder, libraryName)); d != (disk{}) {
			return d
		}
	}
	return disk{}
}

// mismatch is what to make of library and kernel module being of different versions. Only a new process can
// have another library, so it is core.ErrDriverStale where another file has the library's place; where there
// is none, a new process would fare no better, and it is up to the kernel module.
func (s *Session) mismatch(err error) error {
	now := s.library.now(s.root)
	text := fmt.Sprintf("%s; %s", err.Error(), s.versions())
	if now == (disk{}) || now.file == s.library.disk.file {
		return fmt.Errorf("library and kernel module of the driver are of different versions (%s): "+
			"load the module of the library's version, or reboot", text)
	}
	return fmt.Errorf("%w (%s, library on disk %s)", core.ErrDriverStale, text, now.version())
}

// versions are those of the mapped library and of the kernel module, as far as they say.
func (s *Session) versions() string {
	library, module := s.library.disk.version(), "unknown"
	// "12.570.124.06": CUDA's version stands before the driver's.
	version, err := call(&s.reader, libraryVersion, core.Node, s.lib.SystemGetNVMLVersion)
	if _, after, ok := strings.Cut(version, "."); err == nil && ok {
		library = after
	}
	if text, err := fs.ReadFile(s.sys, "module/nvidia/version"); err == nil {
		module = strings.TrimSpace(string(text))
	}
	return fmt.Sprintf("library %s, kernel module %s", library, module)
}
