//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const (
	limitOfShare  = 16 << 30 // policies/limits.yaml
	cgroupMount   = "/sys/fs/cgroup"
	limitRounds   = "E2E_LIMIT_ROUNDS" // how often limitTasks tasks begin: 250 rounds are 1,000 tasks
	limitTasks    = 4
	limitPrograms = "E2E_LIMITS_BIN" // the folder of a nomad-gpu for the controllers that this kernel has, and of a Nomad that does without those that it has not
)

// limitsTest is a Nomad node with a pool whose shares have a limit, on control groups of version 2.
type limitsTest struct {
	*agent
	*simdriver.Machine
}

// TestLimits has Nomad start tasks of a pool with limits of memory: fence 13. The first allocation of a task beyond the limit fails, whenever it is made, and
// other tasks of the GPU keep what they have.
func TestLimits(t *testing.T) {
	useUnifiedGroups(t)
	t.Setenv("PATH", os.Getenv(limitPrograms)+"/bin:"+os.Getenv("PATH"))
	text, err := simdriver.Text("h100x8")
	if err == nil {
		text, err = simdriver.WithLimits(text, simdriver.Misc, cgroupMount, "memacct_controller = "+limitController(t, cgroupMount))
	}
	if err != nil {
		t.Fatal(err)
	}
	m, err := simdriver.InstallText(t.Context(), filepath.Join(stateDir(), "machine"), text)
	if err != nil {
		t.Fatal(err)
	}
	writePolicy(t, "limits")
	config := onMachine(m, "nomad-history", fmt.Sprintf("policy_file = %q\n    nomad_address = %q", policyDir()+"/policy.yaml", nomadAPI))
	l := &limitsTest{newAgent(t, "nomad", nomadConfig(t, "nomad", os.Getenv(limitPrograms), config), "-dev"), m}
	l.awaitReady(t)
	l.awaitGPUs(t, 4, 4)
	step(t, "tasks that begin", l.begin)
	step(t, "tasks that begin again", l.beginAgain)
	step(t, "a task beyond its limit", l.leak)
	step(t, "other shares", l.shares)
}

// useUnifiedGroups mounts control groups of version 2 where Nomad and the agent look for them, in this process's mount namespace, if it has those of version 1
// there: in the place of these, because Nomad goes by the first mount.
func useUnifiedGroups(t *testing.T) {
	t.Helper()
	const cgroup2 = 0x63677270 // CGROUP2_SUPER_MAGIC
	var s syscall.Statfs_t
	if err := syscall.Statfs(cgroupMount, &s); err == nil && s.Type == cgroup2 {
		return
	}
	if err := syscall.Unmount(cgroupMount, syscall.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("cgroup2", cgroupMount, "cgroup2", 0, ""); err != nil {
		t.Skip("SKIPPED: no control groups of version 2: ", err)
	}
}

// limitController is the controller of the control groups at a mount point that the simulated driver takes for misc.
func limitController(t *testing.T, mount string) string {
	t.Helper()
	text, err := os.ReadFile(mount + "/cgroup.controllers")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"misc", "hugetlb"} {
		if strings.Contains(" "+strings.TrimSpace(string(text))+" ", " "+name+" ") {
			return name
		}
	}
	t.Skip("SKIPPED: the control groups have neither misc nor hugetlb, which can stand in for it: ", string(text))
	return ""
}

// allocate is a command of a shell that allocates memory of the GPU as the process that runs it, and fails where the driver refuses it.
func (l *limitsTest) allocate(bytes int) string {
	return fmt.Sprintf(`printf 'allocate\t0\t%d\t%s%%s\n' "$(sed -n s/^0:://p /proc/self/cgroup)" | %[3]s/.memacct %[3]s | grep -q ok`, bytes, cgroupMount, l.Root)
}

// begin has the first thing that tasks do be an allocation beyond their limit, which has to fail. Nomad waits for no limit, so on a machine with much other work a
// task can be earlier; but it is not called limited then.
func (l *limitsTest) begin(t *testing.T) {
	rounds := 2
	if text := os.Getenv(limitRounds); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	late := 0
	for round := range rounds {
		name := fmt.Sprintf("begin-%d", round)
		l.submit(t, "limits.nomad.hcl", "name="+name, "driver=raw_exec", "count="+strconv.Itoa(limitTasks), "then="+l.allocate(limitOfShare+1)+" && exit 1; exit 0")
		for _, a := range l.awaitAll(t, name, "complete", "failed") {
			if a.ClientStatus == "failed" {
				late++
				l.mustBeLate(t, a)
			}
		}
		l.stop(t, name)
		must(t, "nomad", "system", "gc", "-address="+nomadAPI) // else the servers list all allocations that have ended whenever one changes: the longer the test runs, the less CPU is left for others
	}
	t.Logf("%d of %d tasks allocated memory before they had a limit", late, rounds*limitTasks)
	if late > 1+rounds*limitTasks/20 {
		t.Error("too many")
	}
}

// mustBeLate fails if a task ended for another reason than that it got memory beyond its limit, or if the agent called it limited before that. One that has ended
// has nothing that is not counted, and its group has the limit by then.
func (l *limitsTest) mustBeLate(t *testing.T, a allocation) {
	t.Helper()
	if text := fmt.Sprint(a.TaskStates); !strings.Contains(text, "Exit Code: 1}") {
		t.Errorf("%s of %s: %s", a.ID, a.JobID, text)
	}
	log, err := os.ReadFile(logPath(l.name))
	if err != nil {
		t.Fatal(err)
	}
	var limited, started string // times
	for line := range strings.Lines(string(log)) {
		switch {
		case !strings.Contains(line, a.ID):
		case strings.Contains(line, "type=Started"):
			started, _, _ = strings.Cut(strings.TrimSpace(line), " ")
		case strings.Contains(line, "state=limited"):
			_, limited, _ = strings.Cut(strings.TrimSpace(line), "timestamp=")
		}
	}
	if started == "" {
		t.Errorf("the log of Nomad does not have when %s started", a.ID)
	}
	if limited != "" && limited < started {
		t.Errorf("%s was called limited at %s, before its start at %s, and allocated more", a.ID, limited, started)
	}
}

// beginAgain has tasks begin again in place: with exec in another control group, which has the limit, too, and with raw_exec in the same: fence 31.
func (l *limitsTest) beginAgain(t *testing.T) {
	for _, driver := range []string{"exec", "raw_exec"} {
		l.submit(t, "limits.nomad.hcl", "name="+driver, "driver="+driver, "then=exec sleep 1000000")
		a := l.awaitAll(t, driver, "running")[0]
		group := scopeOf(a)
		for round := range limitTasks {
			before, err := os.Stat(group)
			if err != nil {
				t.Fatal(err)
			}
			l.awaitLimit(t, group, limitOfShare)
			must(t, "nomad", "alloc", "restart", "-address="+nomadAPI, a.ID)
			await(t, "the task to run again", 30*time.Second, func() error {
				n := l.awaitAll(t, driver, "running")[0].TaskStates["work"].Restarts
				processes, err := os.ReadFile(group + "/cgroup.procs")
				if n != round+1 || len(processes) == 0 {
					return errors.Join(fmt.Errorf("%d restarts, processes %q", n, processes), err)
				}
				return nil
			})
			after, err := os.Stat(group)
			if err != nil {
				t.Fatal(err)
			}
			same := os.SameFile(before, after)
			if same != (driver == "raw_exec") {
				t.Errorf("%s: the same group: %t", driver, same)
			}
			if err := l.hasLimit(group, limitOfShare); same && err != nil {
				t.Errorf("a group that has not ended: %v", err)
			}
		}
		l.awaitLimit(t, group, limitOfShare)
		l.stop(t, driver)
	}
}

// awaitLimit waits until a group can't have more than a share. Nomad waits for no limit: only begin is about work that does not wait either.
func (l *limitsTest) awaitLimit(t *testing.T, group string, share uint64) {
	t.Helper()
	await(t, "the limit of "+group, 60*time.Second, func() error { return l.hasLimit(group, share) })
}

// hasLimit returns nil if a group can't have more than a share.
func (l *limitsTest) hasLimit(group string, share uint64) error {
	more, err := l.Allocate(0, group, share+1)
	if errors.Is(err, simdriver.ErrOutOfMemory) {
		return nil
	}
	if err == nil {
		err = errors.Join(errors.New("it has no limit"), more.Free())
	}
	return err
}

// afterLimit is a command of a shell that begins another one once letGo was called.
func (l *limitsTest) afterLimit(job, then string) string {
	return fmt.Sprintf("until [ -e %s ]; do sleep 0.1; done; %s", l.mark(job), then)
}

// letGo has the task of a job go on when it has its limit.
func (l *limitsTest) letGo(t *testing.T, job string) {
	t.Helper()
	l.awaitLimit(t, scopeOf(l.awaitAll(t, job, "running")[0]), limitOfShare)
	if err := os.WriteFile(l.mark(job), nil, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (l *limitsTest) mark(job string) string { return filepath.Join(l.Root, "go-"+job) }

// scopeOf is the control group of a task.
func scopeOf(a allocation) string {
	return filepath.Join(cgroupMount, "nomad.slice/share.slice", a.ID+".work.scope")
}

// awaitAll waits until all allocations of a job have one of these statuses.
func (l *limitsTest) awaitAll(t *testing.T, job string, statuses ...string) (all []allocation) {
	t.Helper()
	await(t, fmt.Sprintf("all of job %s to be %s", job, statuses), 60*time.Second, func() error {
		all = nil
		if err := l.get("/v1/job/"+job+"/allocations", &all); err != nil {
			return err
		}
		if len(all) == 0 {
			evaluations, err := fetch(nomadAPI + "/v1/job/" + job + "/evaluations")
			return errors.Join(errors.New("it has none: "+evaluations), err)
		}
		for _, a := range all {
			if !slices.Contains(statuses, a.ClientStatus) {
				return fmt.Errorf("%s is %s: %+v", a.ID, a.ClientStatus, a.TaskStates)
			}
		}
		return nil
	})
	return all
}

// leak has a task allocate until it fails, beside one that has its memory.
func (l *limitsTest) leak(t *testing.T) {
	const gib = 1 << 30
	hold := l.allocate(8*gib) + " && echo has && exec sleep 1000000"
	l.submit(t, "limits.nomad.hcl", "name=neighbour", "driver=raw_exec", "then="+l.afterLimit("neighbour", hold))
	l.submit(t, "limits.nomad.hcl", "name=isolated", "driver=exec", "then=exec sleep 1000000")
	neighbour, isolated := l.awaitAll(t, "neighbour", "running")[0], l.awaitAll(t, "isolated", "running")[0]
	l.letGo(t, "neighbour")
	awaitOutput(t, neighbour, "work", "has")
	l.awaitLimit(t, scopeOf(isolated), limitOfShare)
	l.submit(t, "limits.nomad.hcl", "name=leak", "driver=raw_exec", "then="+l.afterLimit("leak", "while "+l.allocate(gib)+"; do echo GiB; done; echo end; exit 7"))
	l.letGo(t, "leak")
	leak := l.awaitAll(t, "leak", "failed")[0]
	out := awaitOutput(t, leak, "work", "end") // also when the task is known to have ended
	if count := strings.Count(out, "GiB"); count != limitOfShare/gib {
		t.Errorf("the task got %d GiB", count)
	}
	if _, err := l.Allocate(0, scopeOf(neighbour), 8*gib); err != nil {
		t.Errorf("the neighbour does not get the rest of its share: %v", err)
	}
	if _, err := l.Allocate(0, scopeOf(isolated), limitOfShare); err != nil {
		t.Errorf("a task of the driver exec does not get its share: %v", err)
	}
	for _, a := range []allocation{neighbour, isolated} {
		if _, err := l.Allocate(0, scopeOf(a), 1); !errors.Is(err, simdriver.ErrOutOfMemory) {
			t.Errorf("%s gets more than its share: %v", a.JobID, err)
		}
	}
}

// shares has a policy with smaller shares follow one with larger ones: of the two that are free beside two tasks with the larger ones, one fits.
func (l *limitsTest) shares(t *testing.T) {
	const larger = 26 << 30 // policies/limits-larger.yaml
	state := "--state-dir=" + filepath.Join(stateDir(), "nomad-history")
	l.stop(t, "neighbour", "isolated")
	writePolicy(t, "limits-larger")
	must(t, binary("nomad-gpu"), "reload", state)
	l.awaitGPUs(t, 3, 3)
	l.submit(t, "limits.nomad.hcl", "name=before", "driver=raw_exec", "count=2", "then=exec sleep 1000000")
	for _, a := range l.awaitAll(t, "before", "running") {
		l.awaitLimit(t, scopeOf(a), larger)
	}
	writePolicy(t, "limits")
	must(t, binary("nomad-gpu"), "reload", state)
	l.awaitGPUs(t, 4, 3)
	l.submit(t, "limits.nomad.hcl", "name=after", "driver=raw_exec", "count=2", "then=exec sleep 1000000")
	l.awaitLimit(t, scopeOf(l.awaitAll(t, "after", "running")[0]), limitOfShare)
	text := must(t, binary("nomad-gpu"), "inspect", state)
	if all := l.awaitAll(t, "after", "running"); len(all) != 1 || !strings.Contains(text, "some of it began by a policy with other shares") {
		t.Errorf("%d tasks run:\n%s", len(all), text)
	}
	l.stop(t, "before")
	await(t, "the other task", 60*time.Second, func() error {
		if n := len(l.awaitAll(t, "after", "running")); n != 2 {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
	l.awaitGPUs(t, 4, 4)
}

// stop ends jobs. With -purge the servers would forget the allocations before they have ended, which ends no blocking query of the agent (a minute).
func (l *limitsTest) stop(t *testing.T, jobs ...string) {
	t.Helper()
	for _, job := range jobs {
		must(t, "nomad", "job", "stop", "-address="+nomadAPI, "-detach", job)
	}
}
