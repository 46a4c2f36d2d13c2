package usewatch

import (
	"cmp"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// origins reads where processes come from. It keeps what it read of those that still run.
type origins struct {
	proc         string
	orchestrator string
	running      func(gpu.Process) bool
	own          string             // control group of this process, as procfs shows it
	known        map[int]use.Origin // by PID: of the latest reading
}

func newOrigins(o Options) origins {
	r := origins{proc: cmp.Or(o.ProcRoot, "/proc"), orchestrator: o.Orchestrator, running: o.Running}
	if own, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		r.own = string(own)
	}
	return r
}

// read returns the origins of the processes of a reading, and of those of the table before, that run now.
func (r *origins) read(usage []gpu.Usage, was use.Table) map[int]use.Origin {
	next := map[int]use.Origin{}
	add := func(p gpu.Process) {
		if _, done := next[p.PID]; !done && r.running(p) {
			next[p.PID] = r.of(p)
		}
	}
	for _, u := range usage {
		if u.Processes == nil {
			continue
		}
		for _, p := range *u.Processes {
			add(p)
		}
	}
	for _, d := range was.Devices {
		for _, p := range d.Processes {
			add(p.Process)
		}
	}
	r.known = next
	return next
}

// of reads the origin of a process. That of work is read once: an orchestrator moves a process into a control group before the process
// begins its work, and not out of it.
func (r *origins) of(p gpu.Process) use.Origin {
	if o, ok := r.known[p.PID]; ok && o.Started == p.Started && o.Owner != (use.Owner{}) {
		return o
	}
	o := use.Origin{Started: p.Started, Name: printable(strings.TrimSuffix(r.file(p.PID, "comm"), "\n"))}
	text := r.file(p.PID, "cgroup")
	if text == "" {
		o.Unknown = true
		return o
	}
	g := parseGroup(text)
	o.Owner = g.owner
	switch {
	case g.owner.Orchestrator == use.Nomad:
		env, _ := r.environment(p.PID)
		o.Owner = nomadNames(g.owner, env)
	case g.owner == (use.Owner{}) && (g.container || r.orchestrator == use.Nomad && text == r.own):
		env, known := r.environment(p.PID)
		o.Owner, o.Unknown = nomadTask(env), !known
	}
	return o
}

// printable is a text that a process chose, with "?" in place of control characters and of what is not UTF-8: the kernel cuts a name within
// a rune, a terminal obeys escape sequences, and Nomad's protocol allows UTF-8 only.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if c == utf8.RuneError || !unicode.IsPrint(c) {
			return '?'
		}
		return c
	}, text)
}

// file is the content of a file of a process; "" if it can't be read.
func (r *origins) file(pid int, name string) string {
	text, _ := os.ReadFile(filepath.Join(r.proc, strconv.Itoa(pid), name)) // a process that has ended has none
	return string(text)
}

// environment is the environment with which a process was started; false if it is not known. Processes of other users show it only with
// CAP_SYS_PTRACE. A process that writes a title for ps over its arguments (setproctitle, as vLLM and Ray do) overwrites it, too: nothing of
// the form NAME=VALUE is left.
func (r *origins) environment(pid int) (env map[string]string, known bool) {
	env = map[string]string{}
	for line := range strings.SplitSeq(r.file(pid, "environ"), "\x00") {
		key, value, ok := strings.Cut(line, "=")
		known = known || ok
		if ok && strings.HasPrefix(key, "NOMAD_") {
			env[key] = printable(value)
		}
	}
	return env, known
}

// nomadNames adds the names of an allocation to what the control group shows, if the environment is of the same allocation. A process can
// change its environment, so a name may be wrong if the Nomad agent's API is not read; the allocation is not.
func nomadNames(o use.Owner, env map[string]string) use.Owner {
	if env["NOMAD_ALLOC_ID"] != o.ID {
		return o
	}
	o.Namespace, o.Name, o.Container = env["NOMAD_NAMESPACE"], env["NOMAD_JOB_ID"], cmp.Or(o.Container, env["NOMAD_TASK_NAME"])
	return o
}

// nomadTask is the task of which a container is, or a process in the control group of Nomad's agent (raw_exec without control groups).
// Nomad's drivers docker and podman start containers whose control group does not have the allocation. The environment is the only
// evidence: whoever may start containers on the host can claim to be a task, and with that only keeps a process from being shown as
// one without a reservation. Processes outside of containers can't.
func nomadTask(env map[string]string) use.Owner {
	id := env["NOMAD_ALLOC_ID"]
	if !isUUID(id) {
		return use.Owner{}
	}
	return nomadNames(use.Owner{Orchestrator: use.Nomad, ID: id, Container: env["NOMAD_TASK_NAME"]}, env)
}
