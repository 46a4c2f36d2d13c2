package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/node/kmsg"
	"github.com/tandem-gpu/tandem/internal/operator/report"
)

// security is what confines processes.
type security struct {
	Enforcing bool   // SELinux
	AppArmor  string // profile that confines this process; "" = none
}

func readSecurity(_ context.Context, o *Options) func(*Facts) {
	s := security{Enforcing: text(o.sys("fs/selinux/enforce")) == "1"}
	if strings.HasPrefix(text(o.sys("module/apparmor/parameters/enabled")), "Y") {
		s.AppArmor = text(o.proc("self/attr/current"))
		if strings.HasPrefix(s.AppArmor, "unconfined") {
			s.AppArmor = ""
		}
	}
	return func(f *Facts) { f.Security = s }
}

func decideSecurity(f *Facts) (findings []Finding) {
	if f.Security.Enforcing {
		findings = append(findings, Finding{"security", Note, f.sys("fs/selinux/enforce"), "SELinux is enforcing",
			"if containers may not open their GPU (ausearch -m avc): setsebool -P container_use_devices on"})
	}
	if f.Security.AppArmor != "" {
		findings = append(findings, Finding{"security", Note, f.proc("self/attr/current"), "AppArmor confines this process: " + f.Security.AppArmor, ""})
	}
	return findings
}

// clock is the state of the wall clock.
type clock struct {
	Now            time.Time
	Unsynchronised bool
}

func readClock(_ context.Context, o *Options) func(*Facts) {
	unsynchronised, _ := o.system.unsynchronised() // unknown = synchronised
	c := clock{o.system.now(), unsynchronised}
	return func(f *Facts) { f.Clock = c }
}

// earliest is before the first release of this program: a clock before it was never set.
var earliest = time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC)

func decideClock(f *Facts) []Finding {
	switch {
	case f.Late["clock"]:
		return nil
	case f.Clock.Now.Before(earliest):
		return []Finding{{"clock", Problem, "clock_gettime", "the clock is at " + f.Clock.Now.UTC().Format(time.RFC3339) + ": times of faults are wrong, and TLS fails", "set the clock: chronyc makestep, timedatectl set-ntp true"}}
	case f.Clock.Unsynchronised:
		return []Finding{{"clock", Warning, "adjtimex", "the kernel's clock is not synchronised (STA_UNSYNC): times of faults differ from those of other nodes", "check chronyd or systemd-timesyncd: chronyc tracking, timedatectl"}}
	}
	return []Finding{{"clock", OK, "adjtimex", "synchronised", ""}}
}

func readInotify(_ context.Context, o *Options) func(*Facts) {
	err := o.system.inotify()
	return func(f *Facts) { f.Inotify = err }
}

func decideInotify(f *Facts) []Finding {
	if f.Inotify == nil || f.Late["inotify"] {
		return nil
	}
	return []Finding{{"inotify", Warning, f.proc("sys/fs/inotify/max_user_instances"), "no instance left (" + f.Inotify.Error() + "): the agents poll instead", "sysctl fs.inotify.max_user_instances=1024"}}
}

func decideUser(f *Facts) []Finding {
	if f.UID == 0 {
		return nil
	}
	return []Finding{{"user", Warning, "uid", fmt.Sprintf("doctor runs as user %d: files, sockets and processes of others are not visible", f.UID), "run it as root"}}
}

// kernelLines are lines of the kernel log that matter: of the driver, of modules, of the PCI bus.
var kernelLines = regexp.MustCompile(`NVRM|nvidia|nouveau|Lockdown: |Loading of |Key was rejected|pcieport`)

const maxKernelLines = 1000

// readKernelLog reads the log without waiting for more.
func readKernelLog(ctx context.Context, o *Options) func(*Facts) {
	if o.KernelLog == "" {
		return func(*Facts) {}
	}
	open := kmsg.Open
	if o.KernelLogOptional {
		open = kmsg.OpenAny
	}
	log, err := open(o.KernelLog)
	if err != nil {
		return func(f *Facts) { f.KernelErr = err }
	}
	defer func() { _ = log.Close() }()
	var lines []string
	_ = log.Messages(ctx, func(message string) { // what was read before an error is enough
		if kernelLines.MatchString(message) {
			lines = append(lines, strings.TrimSpace(message))
		}
	})
	lines = lines[max(0, len(lines)-maxKernelLines):]
	return func(f *Facts) { f.Kernel = lines }
}

func decideKernelLog(f *Facts) []Finding {
	switch {
	case f.Late["kernel log"]:
		return nil
	case f.KernelLog == "":
		return []Finding{{"kernel log", Note, "configuration", "not read, by configuration: " + health.WithoutKernelLog, "to see them: " + kernelLogSetting(f)}}
	case f.KernelErr == nil:
		return []Finding{{"kernel log", OK, f.KernelLog, "readable", ""}}
	}
	severity := Warning
	if f.KernelLogOptional {
		severity = Note
	}
	reason := f.KernelErr.Error()
	if unavailable, ok := errors.AsType[*kmsg.UnavailableError](f.KernelErr); ok {
		reason = unavailable.Reason()
	}
	return []Finding{{"kernel log", severity, f.KernelLog, "not readable (" + reason + "): " + health.WithoutKernelLog,
		"run the agent as root, with the capability SYSLOG" + remedyInPod(f, ", which the chart's value kernelLog gives it")}}
}

// kernelLogSetting is the setting that has the kernel log read.
func kernelLogSetting(f *Facts) string {
	if f.kubernetes() {
		return "--kernel-log=auto" + remedyInPod(f, " (kernelLog: true in the chart)")
	}
	return `kernel_log = "auto"`
}

// decideCDI is about the specifications that container runtimes read.
func decideCDI(f *Facts) []Finding {
	var findings []Finding
	offered := f.Offered()
	for _, file := range f.CDIFiles {
		switch {
		case file.Problem != "":
			findings = append(findings, Finding{"cdi", Warning, file.Path, "CDI specification not valid, so container runtimes ignore it: " + firstLine(file.Problem), "correct or remove it; nvidia-ctk cdi generate writes one"})
		case offered.CDI != nil && !file.Own && file.Kind == offered.CDI.Kind:
			findings = append(findings, Finding{"cdi", Problem, file.Path, "defines devices of " + file.Kind + ", as the agent's own file does: a device that is in both can't be used", "remove it"})
		}
	}
	if c := offered.CDI; c != nil && c.NoMemoryLimits != "" && (f.Limits == inventory.LimitNone || len(limitHook(f)) == 0) {
		findings = append(findings, Finding{"cdi", Warning, c.Folder, c.NoMemoryLimits, "if containers have these variables: install nvidia-container-toolkit 1.20.1 or later, in a folder that this process sees"})
	}
	if c := offered.CDI; c != nil && !c.Usable && c.Reason+c.Problem != "" && c.Reason != report.CDINotWritten {
		findings = append(findings, Finding{"cdi", Note, c.Folder, "containers do not get CDI names: " + strings.TrimPrefix(c.Problem+"; "+c.Reason, "; "), ""})
	}
	if len(findings) == 0 && len(f.CDIFiles) > 0 {
		findings = []Finding{{"cdi", OK, filepath.Dir(f.CDIFiles[0].Path), report.Noun(len(f.CDIFiles), "specification"), ""}}
	}
	return findings
}

// Process is a process of a program that matters here.
type Process struct {
	PID  int
	Name string   // of its program, without the folder
	Args []string // args[0] included
}

// programs are those programs.
var programs = []string{"nvidia-device-plugin", "nomad-device-nvidia", "kubelet", "nomad", "dockerd"}

func readProcesses(ctx context.Context, o *Options) func(*Facts) {
	found := Processes(ctx, o.proc(""))
	return func(f *Facts) { f.Processes = found }
}

// Processes returns the processes of those programs beneath a root of procfs. A process that changes its memory map may delay it.
func Processes(ctx context.Context, proc string) (found []Process) {
	entries, _ := os.ReadDir(proc)
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || ctx.Err() != nil {
			continue
		}
		comm := text(filepath.Join(proc, e.Name(), "comm")) // at most 15 bytes
		if comm == "" || !slices.ContainsFunc(programs, func(p string) bool { return strings.HasPrefix(p, comm) }) {
			continue
		}
		args := strings.Split(strings.TrimSuffix(text(filepath.Join(proc, e.Name(), "cmdline")), "\x00"), "\x00")
		if name := filepath.Base(args[0]); slices.Contains(programs, name) {
			found = append(found, Process{pid, name, args})
		}
	}
	return found
}

// Running returns the processes of a program.
func (f *Facts) Running(program string) (found []Process) {
	for _, p := range f.Processes {
		if p.Name == program {
			found = append(found, p)
		}
	}
	return found
}

// decideOthers is about plugins of the other orchestrator: those of the own one are in its checks.
func decideOthers(f *Facts) (findings []Finding) {
	other := map[bool]struct{ plugin, orchestrator, doctor string }{
		true: {"nomad-device-nvidia", "nomad", "nomad-gpu doctor"}, false: {"nvidia-device-plugin", "kubelet", "k8s-gpu doctor"},
	}[f.kubernetes()]
	for _, p := range f.Running(other.plugin) {
		findings = append(findings, Finding{"other plugin", Problem, fmt.Sprintf("process %d", p.PID), p.Name + " runs on this node, and offers the same GPUs to another orchestrator",
			"end it, and run the agent of that orchestrator: both agents see each other's GPUs"})
	}
	if len(findings) == 0 && len(f.Running(other.orchestrator)) > 0 {
		findings = append(findings, Finding{"other plugin", Note, fmt.Sprintf("process %d", f.Running(other.orchestrator)[0].PID), other.orchestrator + " runs on this node, too: see " + other.doctor, ""})
	}
	return findings
}
