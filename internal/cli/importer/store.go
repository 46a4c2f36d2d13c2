package importer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Store writes files to path, or several of them into the folder path, each as NAME followed by extension. It returns the paths. With
// an error no file is new, and none is changed: everything is written beside its place first, and an existing file is replaced only
// with force. With force, files before one that can't be replaced (a folder has its name) are.
func Store(path, extension string, files []File, force bool) ([]string, error) {
	targets, err := targetsOf(path, extension, files)
	if err != nil {
		return nil, err
	}
	if !force {
		for _, target := range targets {
			if _, err := os.Lstat(target); err == nil {
				return nil, fmt.Errorf("%s exists: give another name, or --force to replace it", target)
			} else if !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
		}
	}
	staged := make([]string, 0, len(files))
	defer func() {
		for _, s := range staged {
			_ = os.Remove(s)
		}
	}()
	for i, f := range files {
		name, err := stage(targets[i], f.Text)
		if err != nil {
			return nil, err
		}
		staged = append(staged, name)
	}
	return targets, place(staged, targets, force)
}

func targetsOf(path, extension string, files []File) ([]string, error) {
	info, err := os.Stat(path)
	folder := err == nil && info.IsDir() || strings.HasSuffix(path, "/")
	switch {
	case !folder && len(files) == 1:
		return []string{path}, nil
	case !folder:
		return nil, fmt.Errorf("%s: the input has %d configurations: give a folder that exists, or one of them by --config NAME", path, len(files))
	case err != nil:
		return nil, err
	}
	var targets []string
	for _, f := range files {
		name := f.Name
		if name == "" {
			name = "config"
		}
		if name != filepath.Base(name) || name == "." || name == ".." {
			return nil, fmt.Errorf("%q is the name of a configuration and no name of a file: give it by --config, and a file", name)
		}
		target := filepath.Join(path, strings.TrimSuffix(name, extension)+extension)
		if slices.Contains(targets, target) {
			return nil, fmt.Errorf("two configurations would be %s: give one of them by --config, and a file", target)
		}
		targets = append(targets, target)
	}
	return targets, nil
}

// stage writes a text to a new file beside target, and returns its path.
func stage(target string, text []byte) (path string, err error) {
	f, err := os.CreateTemp(filepath.Dir(target), "."+filepath.Base(target)+".*")
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return "", err
	}
	return f.Name(), nil
}

// place gives staged files their names. Without force a name that exists meanwhile is an error, and the names given before are taken
// back.
func place(staged, targets []string, force bool) error {
	for i := range staged {
		var err error
		if force {
			err = os.Rename(staged[i], targets[i])
		} else {
			err = os.Link(staged[i], targets[i]) // unlike a rename it replaces nothing
		}
		if err == nil {
			continue
		}
		if !force {
			for _, given := range targets[:i] {
				_ = os.Remove(given)
			}
		}
		return err
	}
	return nil
}
