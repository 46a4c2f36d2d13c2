package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// printRecording is the command -record.
func printRecording(library, sysfs string) error {
	r, err := recordLibrary(library, sysfs)
	if err != nil {
		return err
	}
	_, err = os.Stdout.WriteString(r.Text)
	return err
}

// record records the driver as a machine of the simulated driver, lets that play it, and compares it with the machine file of the
// same model.
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
		var texts []string
		for text := range unexpected {
			texts = append(texts, text)
		}
		slices.Sort(texts)
		r.add(part, "answers that a machine file does not have", Note, strings.Join(texts, "\n"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r.playRecording(ctx, recorded.Text)
	r.compareWithModel(recorded)
}

// playRecording lets the simulated driver play a recording, and records that in another process: NVML's functions are bound once in
// each process.
func (r *run) playRecording(ctx context.Context, text string) {
	const part, name = "fixture", "the simulated driver plays it"
	m, err := simdriver.InstallText(ctx, filepath.Join(r.dir, "played"), text)
	if err != nil { // its library is compiled in the source tree, with Go and NVML's header from the module cache
		r.add(part, name, LeftOut, "it can't be built here: "+err.Error())
		return
	}
	self, err := os.Executable()
	if err != nil {
		r.add(part, name, Failed, err.Error())
		return
	}
	cmd := exec.CommandContext(ctx, self, "-record", m.Library, "-root", m.Root)
	cmd.Env = append(os.Environ(), "SIMDRIVER_MACHINE="+m.Root, recordVariable+"=1")
	out, err := cmd.Output()
	if err != nil {
		r.add(part, name, Failed, fmt.Sprint(err, ": ", string(out)))
		return
	}
	if lines := lineDifferences(text, string(out)); len(lines) > 0 {
		r.add(part, name, Note, "a recording of it differs:\n"+strings.Join(lines, "\n"))
		return
	}
	r.add(part, name, OK, "a recording of it is equal")
}

// recordVariable is set in the process that records what is played: in a test, the program is the test's.
const recordVariable = "TANDEM_HARDWARE_RECORD"

// lineDifferences are the lines that only one of two texts has.
func lineDifferences(a, b string) (different []string) {
	first, second := strings.Split(a, "\n"), strings.Split(b, "\n")
	for _, line := range first {
		if !slices.Contains(second, line) {
			different = append(different, "driver:    "+line)
		}
	}
	for _, line := range second {
		if !slices.Contains(first, line) {
			different = append(different, "simulated: "+line)
		}
	}
	return different
}

// compareWithModel compares with the machine file of the same model.
func (r *run) compareWithModel(recorded record.Recording) {
	const part = "fixture"
	if len(recorded.GPUs) == 0 {
		return
	}
	name := recorded.GPUs[0].Values["name"]
	r.Model = record.Model(name)
	if r.Model == "" {
		r.add(part, "the simulated driver has this model", Note, "it has no machine with "+name+": machine.conf can become one")
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
	var lines []string
	for _, d := range r.Differences {
		lines = append(lines, fmt.Sprintf("%s (%s): the driver has %s, the simulated machine %s", d.Key, d.Function, d.Driver, d.Simulated))
	}
	r.add(part, "answers compared with the simulated machine "+r.Model, Note, strings.Join(lines, "\n"))
}
