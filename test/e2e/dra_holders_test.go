//go:build e2e

package e2e

import (
	"fmt"
	"maps"
	"os"
	"path"
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
// folder, or by the variable that a runtime reads; and which proofs and resets of agents have it. It reads no record of an orchestrator or of an agent.
type holderTrace struct {
	machine *simdriver.Machine
	minors  map[string]string // UUID by name of the node: "nvidia0"

	mu    sync.Mutex
	looks int
	now   map[string][]string  // holders by UUID, at the last look
	acts  map[string]time.Time // when each proof and each reset was first seen
	ended map[string]time.Time // when each agent was ended last
	wrong []string             // what was seen of GPUs with two holders, or open in an agent while they are reset
}

// holdersEvery is the resolution of the trace. Two holders overlap for at least the time that an orchestrator takes to start the next container.
const holdersEvery = 100 * time.Millisecond

// traceHolders looks until the end of the test. The processes of works and of proofs are sleep, or the probe, that of a reset is nvidia-smi.
func traceHolders(t *testing.T, m *simdriver.Machine) *holderTrace {
	t.Helper()
	h := &holderTrace{machine: m, minors: map[string]string{}, acts: map[string]time.Time{}, ended: map[string]time.Time{}}
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
	h.now = now
	for gpu, works := range now {
		slices.Sort(works)
		if len(works) > 1 {
			h.note("%s is used by two at once: %s", gpu, strings.Join(works, ", "))
		}
		for _, name := range works {
			if _, found := h.acts[name]; !found && isAct(name) {
				h.acts[name] = time.Now()
			}
			h.checkClosed(name, gpu)
		}
	}
}

// note notes what is wrong, once.
func (h *holderTrace) note(format string, of ...any) {
	if text := fmt.Sprintf(format, of...); !slices.Contains(h.wrong, text) {
		h.wrong = append(h.wrong, text)
	}
}

// isAct reports whether a holder is a proof or a reset of an agent.
func isAct(name string) bool {
	return strings.HasPrefix(name, "proof ") || strings.HasPrefix(name, "reset ")
}

// resetEnds is the time between the order to end an agent and that end. The reset that it has begun goes on, and the driver is released for it no longer.
const resetEnds = 5 * time.Second

// checkClosed notes agents that have a GPU open while it is reset.
func (h *holderTrace) checkClosed(name, gpu string) {
	resets, reset, _ := strings.Cut(strings.TrimPrefix(name, "reset by "), " ") // agent and process
	if !strings.HasPrefix(name, "reset ") || h.acts[name].Sub(h.ended[resets]) < resetEnds {
		return
	}
	var open []int
	for pid := range agents() {
		nodes, err := h.machine.HeldBy(pid)
		if err != nil || slices.ContainsFunc(nodes, func(node string) bool { return h.minors[path.Base(node)] == gpu }) {
			open = append(open, pid)
		}
	}
	if _, gpus := h.work("/proc/"+reset, argvOf("/proc/"+reset)); open != nil && slices.Contains(gpus, gpu) { // it still runs
		h.note("%s is open in agents, processes %v, during the %s", gpu, open, name)
	}
}

// agents are the processes of both agents.
func agents() map[int]int {
	all := running("nomad-gpu")
	maps.Copy(all, running("k8s-gpu"))
	return all
}

// ends notes that agents are ended now, or that what they share is removed.
func (h *holderTrace) ends(agents ...string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, agent := range agents {
		h.ended[agent] = time.Now()
	}
}

// undisturbed is how long ago an agent was ended last.
func (h *holderTrace) undisturbed() time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := time.Time{}
	for _, at := range h.ended {
		last = slices.MaxFunc([]time.Time{last, at}, time.Time.Compare)
	}
	return time.Since(last)
}

// acted is how many proofs or resets were seen.
func (h *holderTrace) acted(what string) (count int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.acts {
		if strings.HasPrefix(name, what+" ") {
			count++
		}
	}
	return count
}

// works are the GPUs of each pod, allocation, proof and reset whose process runs.
func (h *holderTrace) works() map[string][]string {
	works := map[string][]string{}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		process := filepath.Dir(file)
		argv := argvOf(process)
		if program := path.Base(argv[0]); program != "sleep" && program != "probe" && program != "nvidia-smi" {
			continue
		}
		if name, gpus := h.work(process, argv); len(gpus) > 0 {
			works[name] = slices.Compact(slices.Sorted(slices.Values(append(works[name], gpus...))))
		}
	}
	return works
}

// argvOf is the command line of a process: of one that is gone meanwhile, an empty word.
func argvOf(process string) []string {
	text, _ := os.ReadFile(process + "/cmdline")
	return strings.Split(string(text), "\x00")
}

// resetBy is the name of a reset that runs nvidia-smi, by the agent that makes it. For k8s-gpu its server does, in a container.
func resetBy(process string) string {
	agent := "k8s-gpu"
	if own, _ := os.Readlink("/proc/self/ns/mnt"); own == mountsOf(process) {
		agent = "nomad-gpu"
	}
	return fmt.Sprintf("reset by %s %s", agent, path.Base(process))
}

func mountsOf(process string) string {
	namespace, _ := os.Readlink(process + "/ns/mnt") // "" = the process has ended
	return namespace
}

// work returns the name of the pod, the allocation, the proof or the reset that a process belongs to, and its GPUs.
func (h *holderTrace) work(process string, argv []string) (name string, gpus []string) {
	if slices.Contains(argv, "--gpu-reset") {
		return resetBy(process), argv[slices.Index(argv, "-i")+1:][:1]
	}
	environ, _ := os.ReadFile(process + "/environ")
	proof := strings.Contains("\x00"+string(environ), "\x00TANDEM_PROOF_REASON=")
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
	if proof { // in an agent's container, which may have all nodes
		return "proof " + path.Base(process), gpus
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

// checkAlone fails if two of pod, claim, allocation, proof and reset had one GPU at the same time, or an agent had one open while it was reset.
func (h *holderTrace) checkAlone(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	t.Logf("looked %d times at the holders of each GPU; now %v", h.looks, h.now)
	for _, wrong := range h.wrong {
		t.Error(wrong)
	}
}
