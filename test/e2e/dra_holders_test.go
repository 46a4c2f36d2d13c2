//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// holderTrace records which containers and tasks can use each GPU, as their processes see it: by the device nodes in their root
// folder, or by the variable that a runtime reads. It reads no record of an orchestrator or of an agent.
type holderTrace struct {
	minors map[string]string // UUID by name of the node: "nvidia0"

	mu    sync.Mutex
	looks int
	now   map[string][]string // holders by UUID, at the last look
	twice []string            // what was seen of GPUs with two holders
}

// holdersEvery is the resolution of the trace. Two holders overlap for at least the time that an orchestrator takes to start the next container.
const holdersEvery = 100 * time.Millisecond

// traceHolders looks until the end of the test. The processes of works are sleep, or the probe.
func traceHolders(t *testing.T, m *simdriver.Machine) *holderTrace {
	t.Helper()
	h := &holderTrace{minors: map[string]string{}}
	slots, err := m.Slots()
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range slots { // of whole GPUs slots are minor numbers
		h.minors["nvidia"+strconv.Itoa(slot)] = m.UUID(slot)
	}
	var looking sync.WaitGroup
	ctx := t.Context()
	looking.Go(func() {
		tick := time.NewTicker(holdersEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			h.look()
			<-tick.C
		}
	})
	t.Cleanup(looking.Wait)
	return h
}

func (h *holderTrace) look() {
	now := map[string][]string{}
	for work, gpus := range h.works() {
		for _, gpu := range gpus {
			now[gpu] = append(now[gpu], work)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.looks++
	for gpu, works := range now {
		slices.Sort(works)
		if text := fmt.Sprintf("%s: %s", gpu, strings.Join(works, ", ")); len(works) > 1 && !slices.Contains(h.twice, text) {
			h.twice = append(h.twice, text)
		}
	}
	h.now = now
}

// works are the GPUs of each pod and each allocation whose process runs.
func (h *holderTrace) works() map[string][]string {
	works := map[string][]string{}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		text, _ := os.ReadFile(file) // gone meanwhile: an empty line
		program, _, _ := strings.Cut(string(text), "\x00")
		if program != "sleep" && program != "/usr/bin/probe" {
			continue
		}
		if name, gpus := h.work(filepath.Dir(file)); len(gpus) > 0 {
			works[name] = slices.Compact(slices.Sorted(slices.Values(append(works[name], gpus...))))
		}
	}
	return works
}

// work returns the name of the pod or the allocation that a process belongs to, and its GPUs.
func (h *holderTrace) work(process string) (name string, gpus []string) {
	environ, _ := os.ReadFile(process + "/environ")
	for pair := range strings.SplitSeq(string(environ), "\x00") {
		key, value, _ := strings.Cut(pair, "=")
		switch {
		case key == "HOSTNAME" && name == "", key == "NOMAD_ALLOC_ID":
			name = value
		case key == "NVIDIA_VISIBLE_DEVICES":
			for id := range strings.SplitSeq(value, ",") {
				if slices.Contains(slices.Collect(maps.Values(h.minors)), deviceOf(id)) {
					gpus = append(gpus, deviceOf(id))
				}
			}
		}
	}
	for node, uuid := range h.minors {
		if _, err := os.Lstat(process + "/root/dev/" + node); err == nil {
			gpus = append(gpus, uuid)
		}
	}
	return name, gpus
}

// holders are those of each GPU at the last look.
func (h *holderTrace) holders() map[string][]string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return maps.Clone(h.now)
}

// checkAlone fails if two works had one GPU at the same time.
func (h *holderTrace) checkAlone(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	t.Logf("looked %d times at the holders of each GPU; now %v", h.looks, h.now)
	for _, twice := range h.twice {
		t.Errorf("used by two at once: %s", twice)
	}
}
