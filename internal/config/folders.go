package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// systemFolders are the folders that a node has for all of its programs (Filesystem Hierarchy Standard 3.0), with all that is in those of the
// kernel and of installed programs.
var systemFolders = regexp.MustCompile(`^/((dev|etc|home|media|mnt|opt|root|run|srv|tmp|var)?` +
	`|dev/[^/]+|var/(account|backups|cache|crash|games|lib|local|lock|log|mail|opt|run|spool|tmp|yp)` +
	`|(bin|boot|lib|lib32|lib64|libx32|proc|sbin|sys|usr)(/.*)?)$`)

// programFolders are folders whose files other programs run or obey, with all that is in them.
var programFolders = regexp.MustCompile(`^/(etc|var/spool|(var/)?run/(systemd|udev))(/.*)?$`)

// ownPrograms are those of programFolders that are made for what an agent writes.
var ownPrograms = regexp.MustCompile(`^/etc/(cdi|tandem|kubernetes/(.*/)?features[.]d)(/.*)?$`)

// ofSystem reports whether a folder belongs to the operating system.
func ofSystem(folder string) bool {
	return systemFolders.MatchString(folder) || programFolders.MatchString(folder) && !ownPrograms.MatchString(folder)
}

// ownFolder sets the absolute path of a folder in which the agent, as user 0, writes, or which containers get: none of
// the system. If names is not nil, the folder may only be missing or empty, or have an entry with a name that names
// accepts: else it is another program's.
func ownFolder(field *string, example string, names func(string) bool) binding {
	b := path(field, example)
	return custom(b.Type, func(v Value) error {
		if err := b.set(v); err != nil {
			return err
		}
		folder := filepath.Clean(v.Text)
		if ofSystem(folder) {
			return fmt.Errorf("want a folder of its own such as %s: %s belongs to the operating system", example, folder)
		}
		if others := entriesOfOthers(folder, names); len(others) > 0 {
			return fmt.Errorf("want a folder of its own such as %s: %s has files of other programs, such as %s", example, folder, others[0])
		}
		return nil
	})
}

// inOwnFolder sets the absolute path of a file or socket in a folder in which the agent writes.
func inOwnFolder(field *string, example string) binding {
	folder := ownFolder(new(string), filepath.Dir(example), nil)
	return custom(absolutePath, func(v Value) error {
		if *field = v.Text; !filepath.IsAbs(v.Text) {
			return errors.New("want an absolute path such as " + example)
		}
		return folder.set(Value{Text: filepath.Dir(v.Text)})
	})
}

// readFolderAtMost limits the time for which a disk that hangs delays an agent. What such a folder has is not known, and nothing is refused.
const readFolderAtMost = time.Second

// entriesOfOthers returns the names in a folder, sorted, if there are some and names accepts none of them. Hidden names do not count, nor does the
// one that each file system of Linux's ext family has.
func entriesOfOthers(folder string, names func(string) bool) []string {
	if names == nil {
		return nil
	}
	read := make(chan []string, 1)
	go func() {
		entries, _ := os.ReadDir(folder) // a folder that can't be read has no known entry
		var all []string
		for _, e := range entries {
			all = append(all, e.Name())
		}
		read <- slices.DeleteFunc(all, func(name string) bool { return strings.HasPrefix(name, ".") || name == "lost+found" })
	}()
	select {
	case all := <-read:
		if slices.ContainsFunc(all, names) {
			return nil
		}
		return all
	case <-time.After(readFolderAtMost):
		return nil
	}
}

// inStateDir reports whether an agent, or a component (reset-server, limit-server), writes a file or folder of this name in the state directory, or an operator a policy file.
func inStateDir(name string) bool {
	return strings.HasPrefix(name, "k8s-gpu.") || strings.HasPrefix(name, "nomad-gpu.") || strings.HasPrefix(name, "reset.sock") || strings.HasPrefix(name, "limits.sock") ||
		slices.Contains([]string{"agents", "dra", "ownership.json"}, name) || slices.Contains([]string{".yaml", ".yml"}, filepath.Ext(name))
}

// isJobFile reports whether dcgm-exporter reads a file of this name: that of a GPU's index.
func isJobFile(name string) bool {
	_, err := strconv.ParseUint(name, 10, 32)
	return err == nil
}
