package usage

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/test/check"
)

const (
	session = "0::/user.slice/user-1000.slice/session-4.scope\n"
	task    = "0::/nomad.slice/share.slice/" + allocID + ".main.scope\n"
	docker  = "0::/system.slice/docker-" + container + ".scope\n"
	podman  = "0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + container + ".scope/container\n"

	environ = "PATH=/bin\x00NOMAD_ALLOC_ID=" + allocID + "\x00NOMAD_JOB_ID=train\x00NOMAD_JOB_NAME=other\x00NOMAD_TASK_NAME=main\x00NOMAD_NAMESPACE=batch\x00"

	rootMount = "612 480 0:52 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/var/lib/docker/overlay2/l/A\n"
	taskMount = rootMount + "640 612 254:1 /opt/nomad/data/alloc/" + allocID + "/main/local /local rw,relatime - ext4 /dev/vda1 rw\n" +
		"641 612 254:1 /opt/nomad/data/alloc/" + allocID + "/alloc /alloc rw,relatime - ext4 /dev/vda1 rw\n"
)

var (
	full   = holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Name: "train", Container: "main", ID: allocID}
	ofTask = holders.Work{Orchestrator: holders.Nomad, Container: "main", ID: allocID}
	ofID   = holders.Work{Orchestrator: holders.Nomad, ID: allocID}
	ofPod  = holders.Work{Orchestrator: holders.Kubernetes, ID: podUID}
)

// The work of a process is that of its control group; the environment adds the names, and in a container so do the mounts.
func TestOrigins(t *testing.T) {
	for name, tc := range map[string]struct {
		cgroup, environ, mounts string
		want                    holders.Work
		unreserved              bool
	}{
		"a task":                     {task, environ, "", full, false},
		"a task, another allocation": {task, "NOMAD_ALLOC_ID=x\x00NOMAD_JOB_ID=y", "", ofTask, false},
		"a task with endless names":  {task, strings.ReplaceAll(environ, "train", strings.Repeat("x", 5000)), "", holders.Work{Orchestrator: holders.Nomad, Namespace: "batch", Container: "main", ID: allocID}, false},
		"a task of docker":           {docker, environ, taskMount, full, false},
		"a task of docker, env -i":   {docker, "PATH=/bin\x00", taskMount, ofID, false},
		"a task of docker, a title":  {docker, "ine Core\x00\x00\x00\x00", taskMount, ofID, false},
		"a task of podman":           {podman, "PATH=/bin\x00", taskMount, ofID, false},
		"variables in a container":   {docker, environ, "", full, false},
		"a container of a person":    {docker, "PATH=/bin\x00", rootMount, holders.Work{}, true},
		"a container without root":   {podman, "PATH=/bin\x00", rootMount, holders.Work{}, true},
		"a container, no mounts":     {docker, "PATH=/bin\x00", "", holders.Work{}, false},
		"many mounts":                {docker, "", strings.Repeat(rootMount, maxFile/len(rootMount)+1), holders.Work{}, false},
		"a shell with the variables": {session, environ, taskMount, holders.Work{}, true},
		"a pod":                      {"0::/kubepods/pod" + podUID + "/" + container + "\n", environ, "", ofPod, false},
		"unreadable":                 {"", environ, "", holders.Work{}, false},
		"a service":                  {"0::/system.slice/ssh.service\n", "", "", holders.Work{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.recordErr = errors.New("no API")
			n.start(t, 0, 7, "cgroup", tc.cgroup, "environ", tc.environ, "mountinfo", tc.mounts, "comm", "py\x1b[2J\xe3\x81\n")
			watched(t, n, inventory.OccupancyReport, holders.Nomad, func(w *Watcher) {
				p := device(w, 0).Processes
				if len(p) != 1 || p[0].Name != "py?[2J??" || p[0].Owner != tc.want || p[0].Unreserved != tc.unreserved {
					t.Errorf("%+v, want %+v, unreserved %t", p, tc.want, tc.unreserved)
				}
				if owners := device(w, 0).Owners(); len(owners) == 1 != (tc.want != holders.Work{}) || w.Table().HoldersKnown {
					t.Errorf("owners %+v", owners)
				}
			})
		})
	}
}

// A process of a task that has moved to a login session, or started with another environment, is the task's, or it is not known whose it is. It is
// of no work only if a person has started it.
func TestOriginByAncestors(t *testing.T) {
	own, err := os.ReadFile("/proc/self/cgroup")
	check.NoError(t, err)
	const unset = "4294967295"
	type files []string
	for name, tc := range map[string]struct {
		processes []files // of 7, of its parent 8, and so on; the last one is a child of 1 unless it has another parent
		want      holders.Work
		known     bool
	}{
		"su in a task":               {[]files{{"cgroup", session}, {"cgroup", session}, {"cgroup", task}}, ofTask, true},
		"sshd in a pod":              {[]files{{"cgroup", session}, {"cgroup", "0::/kubepods/pod" + podUID + "/" + container + "\n"}}, ofPod, true},
		"a session of a container":   {[]files{{"cgroup", session}, {"cgroup", docker, "mountinfo", taskMount}}, ofID, true},
		"a login":                    {[]files{{"cgroup", session}, {"cgroup", session}, {"cgroup", "0::/system.slice/ssh.service\n"}}, holders.Work{}, true},
		"after the logout":           {[]files{{"cgroup", session}}, holders.Work{}, true},
		"a daemon of su in a task":   {[]files{{"cgroup", session, "loginuid", unset}}, holders.Work{}, false},
		"no logins in this kernel":   {[]files{{"cgroup", session, "loginuid", ""}}, holders.Work{}, false},
		"an unreadable parent":       {[]files{{"cgroup", session}, {"cgroup", ""}}, holders.Work{}, false},
		"no parent":                  {[]files{{"cgroup", session, "stat", "7 (x"}}, holders.Work{}, false},
		"a circle":                   {[]files{{"cgroup", session}, {"cgroup", session, "stat", childOf(7)}}, holders.Work{}, false},
		"raw_exec":                   {[]files{{"cgroup", string(own), "environ", environ}}, full, true},
		"env -i under raw_exec":      {[]files{{"cgroup", string(own), "environ", "PATH=/bin\x00"}, {"cgroup", string(own), "environ", environ}}, full, true},
		"env -i in place":            {[]files{{"cgroup", string(own), "environ", "PATH=/bin\x00"}, {"cgroup", string(own), "comm", "nomad\n"}}, holders.Work{}, false},
		"beside the agent":           {[]files{{"cgroup", string(own), "environ", "PATH=/bin\x00"}, {"cgroup", string(own), "comm", "bash\n"}}, holders.Work{}, true},
		"sudo -i under raw_exec":     {[]files{{"cgroup", session}, {"cgroup", string(own), "environ", environ}}, full, true},
		"a process of the same name": {[]files{{"cgroup", session, "comm", "nomad\n"}}, holders.Work{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			for i, f := range tc.processes {
				stat := childOf(7 + i + 1)
				if i == len(tc.processes)-1 {
					stat = childOf(1)
				}
				n.process(t, 7+i, append(files{"stat", stat}, f...)...)
			}
			r := newOrigins(Options{ProcRoot: n.proc, Orchestrator: holders.Nomad})
			r.agent = "nomad"
			if o := r.of(gpu.Process{PID: 7}); o.Owner != tc.want || o.Unknown == tc.known {
				t.Errorf("%+v, want %+v, known %t", o, tc.want, tc.known)
			}
		})
	}
	t.Run("raw_exec, of another agent", func(t *testing.T) {
		n := newNode(t)
		n.process(t, 7, "cgroup", string(own), "environ", environ)
		r := newOrigins(Options{ProcRoot: n.proc, Orchestrator: holders.Kubernetes})
		if o := r.of(gpu.Process{PID: 7}); o.Owner != (holders.Work{}) || o.Unknown {
			t.Errorf("%+v", o)
		}
	})
}

// The origin of a process is read once; a PID that is used again is another process. While a device does not respond, that of its processes
// is kept.
func TestOriginsAreReadOnce(t *testing.T) {
	n := newNode(t)
	n.start(t, 0, 7, "cgroup", session, "comm", "sh\n")
	r := newOrigins(Options{ProcRoot: n.proc, Running: n.running, Orchestrator: holders.Nomad})
	p := gpu.Process{At: gpu.WholeGPU(coretest.GPU(0)), PID: 7, Started: 7}
	read := func(p gpu.Process, was use.Table) use.Origin {
		all := []gpu.Process{p}
		usage := []gpu.Usage{{Device: coretest.GPU(0)}, {Device: coretest.GPU(1), Processes: &all}}
		if was.Devices != nil {
			usage = nil
		}
		return r.read(usage, was)[p.PID]
	}
	kept := use.Table{Devices: []use.Device{{ID: coretest.GPU(1), Processes: []use.Process{{Process: p}}}}}
	first := read(p, use.Table{})
	if first.Name != "sh" || first.Owner != (holders.Work{}) || first.Started != 7 || first.Unknown {
		t.Errorf("a shell: %+v", first)
	}
	for _, name := range []string{"cgroup", "comm", "environ"} {
		check.NoError(t, os.WriteFile(filepath.Join(n.proc, "7", name), []byte("0::/another\n"), 0o600))
	}
	for range 2 {
		if o := read(p, use.Table{}); o != first {
			t.Errorf("again: %+v", o)
		}
		if o := read(p, kept); o != first {
			t.Errorf("no usage: %+v", o)
		}
	}
	p.Started = 8
	check.NoError(t, os.Remove(filepath.Join(n.proc, "7", "cgroup")))
	if o := read(p, use.Table{}); !o.Unknown || o.Owner != (holders.Work{}) {
		t.Errorf("another process: %+v", o)
	}
	check.NoError(t, os.RemoveAll(filepath.Join(n.proc, "7")))
	if o, ok := r.read(nil, kept)[7]; ok {
		t.Errorf("it has ended: %+v", o)
	}
}

// A process decides how large its environment is: a hundred with megabytes each cost less than one of them, and nothing the second time.
func TestLargeEnvironments(t *testing.T) {
	n := newNode(t)
	const processes, size = 100, 6 << 20
	large := filepath.Join(n.proc, "environ")
	check.NoError(t, os.WriteFile(large, []byte(environ+strings.Repeat("X=y\x00", size/4)), 0o600))
	for pid := range processes {
		n.start(t, 0, 1000+pid, "cgroup", docker)
		check.NoError(t, os.Symlink(large, filepath.Join(n.proc, strconv.Itoa(1000+pid), "environ")))
	}
	r := newOrigins(Options{ProcRoot: n.proc, Running: n.running, Orchestrator: holders.Nomad})
	usage, err := n.Usage(t.Context())
	check.NoError(t, err)
	allocated := func() uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if all := r.read(usage, use.Table{}); len(all) != processes || all[1000].Owner != full {
			t.Errorf("%d origins, %+v", len(all), all[1000])
		}
		runtime.ReadMemStats(&after)
		return after.TotalAlloc - before.TotalAlloc
	}
	if first, second := allocated(), allocated(); first > size || second > 100<<10 {
		t.Errorf("%d bytes, then %d", first, second)
	}
}

// The files of the kernel are in the form that is read.
func TestFilesOfThisProcess(t *testing.T) {
	f, pid := processFiles{root: "/proc"}, os.Getpid()
	parent, ok := f.parent(pid)
	group, whole := f.group(pid)
	_, mounts := f.allocation(pid)
	if parent != os.Getppid() || !ok || group == "" || !whole || f.name(pid) == "" || !mounts {
		t.Errorf("parent %d, control group %q, name %q, mounts %t", parent, group, f.name(pid), mounts)
	}
}
