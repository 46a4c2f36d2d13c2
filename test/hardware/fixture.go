package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/hardware/compare"
	"github.com/tandem-gpu/tandem/test/hardware/record"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// recordLibrary records the machine of a library. The driver is released afterwards.
func recordLibrary(library, sysfs string) (record.Recording, error) {
	lib := nvml.New(nvml.WithLibraryPath(library))
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return record.Recording{}, fmt.Errorf("nvmlInit: %w", ret)
	}
	r, err := record.Record(lib, sysfs)
	if ret := lib.Shutdown(); ret != nvml.SUCCESS {
		err = errors.Join(err, fmt.Errorf("nvmlShutdown: %w", ret))
	}
	return r, err
}

// recordWithin is recordLibrary for a driver whose calls may never return.
func recordWithin(limit time.Duration, library, sysfs string) (record.Recording, error) {
	type result struct {
		recording record.Recording
		err       error
	}
	ended := make(chan result, 1)
	go func() {
		recording, err := recordLibrary(library, sysfs)
		ended <- result{recording, err}
	}()
	select {
	case r := <-ended:
		return r.recording, r.err
	case <-time.After(limit):
		return record.Recording{}, fmt.Errorf("a call of the driver has not returned for %v: %w", limit, os.ErrDeadlineExceeded)
	}
}

// record records the driver as a machine of the simulated driver, and compares it with the machine file of the same model. That the
// simulated driver can play such a file is shown by the tests of package record, which play each machine.
func (r *run) record() {
	const part = "fixture"
	recorded, err := recordWithin(2*time.Minute, r.libraryPath(), r.roots.Sys)
	if !r.check(part, "the driver is recorded", fmt.Sprintf("%d GPUs, %d answers", len(recorded.GPUs), len(recorded.Answers)), err) {
		return
	}
	r.Answers = recorded.Answers
	r.sources = append(r.sources, compare.OfRecording(recorded))
	r.files["machine.conf"] = "# Recorded from a real driver; UUIDs and serial numbers are replaced.\n" + record.Anonymous(recorded.Text)
	unexpected := map[string]bool{}
	for _, a := range recorded.Answers {
		if a.Return != "SUCCESS" && a.Return != "NOT_SUPPORTED" {
			unexpected[a.Function+": "+a.Return] = true
		}
	}
	if len(unexpected) > 0 {
		texts := slices.Sorted(maps.Keys(unexpected))
		r.add(part, "answers that a machine file does not have", Note, strings.Join(texts, "\n"))
	}
	r.compareWithModel(recorded)
}

// compareWithModel compares with the machine file of the same model.
func (r *run) compareWithModel(recorded record.Recording) {
	const part = "fixture"
	if len(recorded.GPUs) == 0 {
		return
	}
	r.Model = record.Model(recorded)
	if r.Model == "" {
		r.add(part, "the simulated driver has this model", Note, "it has no machine with "+recorded.GPUs[0].Values["name"]+": machine.conf can become one")
		return
	}
	text, err := simdriver.Text(r.Model)
	if err != nil {
		r.add(part, "machine "+r.Model, Failed, err.Error())
		return
	}
	if r.Differences = record.Compare(recorded, text); len(r.Differences) == 0 {
		r.Differences = []record.Difference{}
		r.add(part, "answers compared with the simulated machine "+r.Model, OK, "none differs")
		return
	}
	r.add(part, "answers compared with the simulated machine "+r.Model, Note, fmt.Sprintf("%d differ: section.md has them", len(r.Differences)))
}
