package usage

import (
	"cmp"
	"os"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/use"
)

// origins reads where processes come from, once for each process: it has memory of a device by then, so it is in its control group.
//
// A process belongs to work if its control group or that of an ancestor shows it: sudo, su and sshd can move what they start into a login
// session. A container of Nomad's drivers docker and podman has the directory of its allocation mounted, or the allocation in its environment.
// A process is of no work only if all of that could be read, up to the first process of the host or of the container.
type origins struct {
	files        processFiles
	orchestrator string
	running      func(gpu.Process) bool
	own          string             // control group of this process, as procfs shows it
	agent        string             // name of the program of the Nomad agent, which also starts its tasks; "" = unknown
	known        map[int]use.Origin // by PID: of the latest reading
}

func newOrigins(o Options) origins {
	r := origins{files: processFiles{root: cmp.Or(o.ProcRoot, "/proc")}, orchestrator: o.Orchestrator, running: o.Running}
	if own, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		r.own = string(own)
	}
	if o.Orchestrator == holders.Nomad {
		name, _ := os.ReadFile("/proc/" + strconv.Itoa(os.Getppid()) + "/comm") // the agent's, which started this plugin
		r.agent = strings.TrimSuffix(string(name), "\n")
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

func (r *origins) of(p gpu.Process) use.Origin {
	if o, ok := r.known[p.PID]; ok && o.Started == p.Started {
		return o
	}
	o := use.Origin{Started: p.Started, Name: r.files.name(p.PID)}
	if text, ok := r.files.group(p.PID); ok {
		o.Group = unifiedPath(text)
	}
	var known bool
	o.Owner, known = r.owner(p.PID)
	o.Unknown = !known
	return o
}

// maxAncestors limits how far a process is from the one that shows its work. A task can start processes one below the other.
const maxAncestors = 32

// owner is the work of a process, the zero value if it belongs to none; false if that is not known.
func (r *origins) owner(pid int) (o holders.Work, known bool) {
	user := false
	for at, n := pid, 0; n < maxAncestors; n++ {
		text, ok := r.files.group(at)
		if !ok {
			return holders.Work{}, false
		}
		g := parseGroup(text)
		switch {
		case g.owner.Orchestrator == holders.Nomad:
			return nomadNames(g.owner, r.files.environment(at)), true
		case g.owner != holders.Work{}:
			return g.owner, true
		case g.container:
			return r.container(at)
		case r.orchestrator == holders.Nomad && text == r.own: // the agent's; raw_exec without control groups
			if o, started := r.startedByAgent(at); started {
				return o, o != holders.Work{}
			}
		}
		user = user || g.user
		if at, ok = r.files.parent(at); !ok {
			return holders.Work{}, false
		}
		if at <= 1 {
			return holders.Work{}, !user || r.files.loggedIn(pid)
		}
	}
	return holders.Work{}, false
}

// startedByAgent reports whether a process in the control group of Nomad's agent is a task, which its environment shows, or the agent's program,
// which starts tasks: then the task is not known.
func (r *origins) startedByAgent(pid int) (o holders.Work, started bool) {
	env := r.files.environment(pid)
	if o = nomadTask(env, env[allocVariable]); o != (holders.Work{}) {
		return o, true
	}
	return o, r.agent != "" && r.files.name(pid) == r.agent
}

// container is the work of a process in a container outside of pods. Whoever may start containers on the host can give one the mounts or the
// environment of a task, and with that only keeps a process from being shown as one without a reservation. Processes outside of containers
// can't.
func (r *origins) container(pid int) (o holders.Work, known bool) {
	env := r.files.environment(pid)
	id, known := r.files.allocation(pid)
	o = nomadTask(env, cmp.Or(id, env[allocVariable]))
	return o, known || o != holders.Work{}
}

// Variables of a task's environment (client/taskenv/env.go in Nomad).
const (
	allocVariable     = "NOMAD_ALLOC_ID"
	namespaceVariable = "NOMAD_NAMESPACE"
	jobVariable       = "NOMAD_JOB_ID"
	taskVariable      = "NOMAD_TASK_NAME"
)

// nomadNames adds the names of an allocation to what the control group shows, if the environment is of the same allocation. A process can
// change its environment, so a name may be wrong if the Nomad agent's API is not read; the allocation is not.
func nomadNames(o holders.Work, env map[string]string) holders.Work {
	if env[allocVariable] != o.ID {
		return o
	}
	o.Namespace, o.Name, o.Container = env[namespaceVariable], env[jobVariable], cmp.Or(o.Container, env[taskVariable])
	return o
}

// nomadTask is the task of an allocation; the zero value if that is none.
func nomadTask(env map[string]string, id string) holders.Work {
	if !isUUID(id) {
		return holders.Work{}
	}
	return nomadNames(holders.Work{Orchestrator: holders.Nomad, ID: id}, env)
}
