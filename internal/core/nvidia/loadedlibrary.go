package nvidia

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// loadedLibrary is the library whose functions this process calls: the first that was loaded, until the process ends.
//
// glibc binds a symbol of the executable to the first definition that it finds, and never unloads a library that the
// executable is bound to. Opened again by the same name, it is the same library, whatever file has that name by then.
// Opened by another name, another file is mapped beside it: dlsym on the new handle then finds the new file's
// function, while a call goes to the old one, or to the new one for a function that only the new file has. So
// functions are looked up in this library only, and it is never closed. linker_test.go checks this behaviour.
var loadedLibrary struct {
	sync.Mutex // held while a library is searched and loaded
	library    atomic.Pointer[library]
}

// loadLibrary returns the library to call: the loaded one, else the one beneath root, which is the loaded one from
// then on. If no library is on disk there is no driver, also if one is loaded.
func loadLibrary(root string) (*library, error) {
	loadedLibrary.Lock()
	defer loadedLibrary.Unlock()
	if l := loadedLibrary.library.Load(); l != nil {
		if l.onDisk(root) == (libraryFile{}) {
			return nil, errNoLibrary(l.searchFolders(root))
		}
		return l, nil
	}
	l, err := findLibrary(root)
	if err != nil {
		return nil, err
	}
	loadedLibrary.library.Store(l)
	return l, nil
}

// libraryFile is a library on disk; the zero value is none.
type libraryFile struct {
	path string
	id   fileID
}

// fileID distinguishes a file from a later one of the same name. The inode number of a mapped file is not used again.
// A file without a link was removed from its folder, but is still bind-mounted into this container: the next
// container gets another file.
type fileID struct {
	device, inode  uint64
	size, modified int64 // bytes; nanoseconds since 1970
	linked         bool
}

func statLibrary(path string) libraryFile {
	info, err := os.Stat(path)
	if err != nil {
		return libraryFile{}
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.IsDir() {
		return libraryFile{}
	}
	return libraryFile{path, fileID{stat.Dev, stat.Ino, stat.Size, info.ModTime().UnixNano(), stat.Nlink > 0}}
}

// version is the driver version in the name of the file that libnvidia-ml.so.1 links to, else the path.
func (f libraryFile) version() string {
	if path, err := filepath.EvalSymlinks(f.path); err == nil {
		if v, ok := strings.CutPrefix(filepath.Base(path), "libnvidia-ml.so."); ok && strings.Contains(v, ".") {
			return v
		}
	}
	return f.path
}

// loadedPath is the path of the library that was just opened by name only.
func loadedPath() string {
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

// searchFolders are the folders in which a new process would search, as far as this one can determine: for the
// dynamic linker, LD_LIBRARY_PATH and the folder of the loaded library.
func (l *library) searchFolders(root string) []string {
	root = filepath.Join("/", root)
	var folders []string
	if root == "/" {
		folders = filepath.SplitList(os.Getenv("LD_LIBRARY_PATH"))
		if l.path == libraryName && l.file.path != "" {
			folders = append(folders, filepath.Dir(l.file.path))
		}
	}
	for _, folder := range libraryFolders {
		folders = append(folders, filepath.Join(root, folder))
	}
	return folders
}

// onDisk is the library that a new process would load.
func (l *library) onDisk(root string) libraryFile {
	for _, folder := range l.searchFolders(root) {
		if f := statLibrary(filepath.Join(folder, libraryName)); f != (libraryFile{}) {
			return f
		}
	}
	return libraryFile{}
}

// versionMismatch is the error for ERROR_LIB_RM_VERSION_MISMATCH: library and kernel module differ in version. It is
// gpu.ErrDriverStale if another library is on disk, which only a new process can load. Otherwise a new process would
// get the same error, and the kernel module has to be replaced.
func (s *Session) versionMismatch(err error) error {
	f := s.library.onDisk(s.root)
	text := fmt.Sprintf("%s; %s", err.Error(), s.versions())
	if f == (libraryFile{}) || f.id == s.library.file.id {
		return fmt.Errorf("library and kernel module of the driver are of different versions (%s): "+
			"load the module of the library's version, or reboot", text)
	}
	return fmt.Errorf("%w (%s, library on disk %s)", gpu.ErrDriverStale, text, f.version())
}

// versions are those of the loaded library and of the kernel module, as far as they are known.
func (s *Session) versions() string {
	library, module := s.library.file.version(), "unknown"
	// "12.570.124.06": the CUDA version, then the driver's.
	version, err := call(&s.reader, libraryVersion, gpu.Node, textOf(s.lib.SystemGetNVMLVersion))
	if _, after, ok := strings.Cut(version, "."); err == nil && ok {
		library = after
	}
	if text, err := fs.ReadFile(s.sys, "module/nvidia/version"); err == nil {
		module = cleanText(string(text))
	}
	return fmt.Sprintf("library %s, kernel module %s", library, module)
}
