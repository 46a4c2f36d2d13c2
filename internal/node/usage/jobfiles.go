package usage

import (
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// jobFiles are the files of a folder that dcgm-exporter reads with --hpc-job-mapping-dir (internal/pkg/transformation/hpc.go there): the name
// is the NVML index of a GPU, each line a job, which becomes the label hpc_job. Files with other names are not read. A GPU without a
// file has metrics without that label; one with an empty file has none, so a free GPU has no file. MIG instances of a GPU share its file.
type jobFiles struct {
	folder       string // "" = none
	orchestrator string // of the agent
	log          *slog.Logger
	written      map[string]string // text by name
	failed       bool              // the latest write failed
}

// list is the name of the file that lists the files of this agent, so that the next one removes what this one leaves if it is killed.
func (f *jobFiles) list() string { return filepath.Join(f.folder, ".tandem-"+f.orchestrator) }

// maxList limits the size of that file in bytes.
const maxList = 64 << 10

// begin removes the files of an earlier agent: no owner is known yet. Files of other programs stay.
func (f *jobFiles) begin() {
	if f.folder == "" {
		return
	}
	f.written = map[string]string{}
	names, _ := statefile.Read(f.list(), maxList, statefile.SharedDir) // none if it is missing
	for name := range strings.FieldsSeq(string(names)) {
		if _, err := strconv.Atoi(name); err == nil {
			f.written[name] = ""
		}
	}
	f.replace(nil)
}

// end removes the files of this agent.
func (f *jobFiles) end() {
	if f.folder != "" {
		f.replace(nil)
		_ = os.Remove(f.list()) // an old list does no harm
	}
}

// write writes the jobs of a table.
func (f *jobFiles) write(inv *inventory.Allocatable, t use.Table) {
	if f.folder == "" {
		return
	}
	jobs := map[string][]string{}
	for u := range inv.Devices() {
		name := strconv.Itoa(u.Device.Index)
		if d, ok := t.Device(u.Device.ID); ok {
			for _, o := range d.Owners() {
				if job := jobOf(o); job != "" {
					jobs[name] = append(jobs[name], job)
				}
			}
		}
	}
	texts := map[string]string{}
	for name, lines := range jobs {
		slices.Sort(lines)
		texts[name] = strings.Join(slices.Compact(lines), "\n") + "\n"
	}
	f.replace(texts)
}

// jobOf is the job of an owner: "namespace/pod", "namespace/job/allocation"; of work without known names the ID; "" = neither is known.
func jobOf(o holders.Work) string {
	switch {
	case o.Name == "":
		return o.ID
	case o.Orchestrator == holders.Nomad:
		return o.Namespace + "/" + o.Name + "/" + o.ID
	}
	return o.Namespace + "/" + o.Name
}

// replace makes the files those of texts, also if another process has removed one: an agent that ends while the next one runs already removes
// its files. What fails is tried again the next time, and logged once.
func (f *jobFiles) replace(texts map[string]string) {
	errs := []error{f.listNew(texts)}
	for name, text := range texts {
		path := filepath.Join(f.folder, name)
		if f.written[name] == text && exists(path) || errs[0] != nil {
			continue
		}
		if err := statefile.Replace(path, []byte(text), 0o644); err != nil {
			errs = append(errs, err)
			continue
		}
		f.written[name] = text
	}
	for _, name := range slices.Sorted(maps.Keys(f.written)) {
		if texts[name] != "" {
			continue
		}
		if err := os.Remove(filepath.Join(f.folder, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			continue
		}
		delete(f.written, name)
	}
	err := errors.Join(errs...)
	if err != nil && !f.failed {
		f.log.Warn("job files of dcgm-exporter not written", "folder", f.folder, "error", err)
	}
	if err == nil && f.failed {
		f.log.Info("job files of dcgm-exporter are written again", "folder", f.folder)
	}
	f.failed = err != nil
}

// listNew writes the list before there is a file that is not in it, and creates the folder.
func (f *jobFiles) listNew(texts map[string]string) error {
	all := maps.Clone(f.written)
	maps.Copy(all, texts)
	if len(all) == len(f.written) && (len(texts) == 0 || exists(f.list())) {
		return nil
	}
	if err := os.MkdirAll(f.folder, 0o755); err != nil {
		return err
	}
	return statefile.Replace(f.list(), []byte(strings.Join(slices.Sorted(maps.Keys(all)), "\n")+"\n"), 0o644)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
