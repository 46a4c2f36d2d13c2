package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// The two recordings of an idle time. Go's own CPU profile can't be used: it samples at the kernel's tick, and an idle agent runs for 50
// to 300 us at a time.
var (
	// onCPU has a sample of every 50 us of CPU time, by a timer of high resolution, in the kernel too. It doubles the CPU time of an idle
	// agent: only the shares of its samples mean anything.
	onCPU = []string{"-e", "cpu-clock", "-c", "50000"}
	// traced has a sample of each system call and each wait.
	traced = []string{"-e", systemCall, "-e", threadSwitch}
)

// Events of the kernel, as perf has them.
const (
	systemCall   = "raw_syscalls:sys_enter"
	threadSwitch = "sched:sched_switch"
)

// sample is one of perf's.
type sample struct {
	at    time.Duration // by the kernel's clock
	event string        // as perf has it
	args  string        // those of the event
	stack []frame       // the innermost first
}

// frame is a function on a stack.
type frame struct {
	address uint64 // in the kernel; elsewhere the offset in the file
	symbol  string // "[unknown]": the file has no symbols, or perf can't read them
	file    string
}

// kernel is whether the frame is the kernel's: its half of the addresses.
func (f frame) kernel() bool { return f.address>>63 == 1 }

// perfCommand is perf with a mount namespace of its own where it may have one, because it mounts the file system of trace points.
func perfCommand(ctx context.Context, args ...string) *exec.Cmd {
	if os.Geteuid() == 0 {
		return exec.CommandContext(ctx, "unshare", append([]string{"--mount", "perf"}, args...)...)
	}
	return exec.CommandContext(ctx, "perf", args...)
}

// recording is what perf writes to a file.
type recording struct {
	events []string // options of perf
	pid    int
	time   time.Duration
	file   string
}

func (r recording) make(ctx context.Context) error {
	args := append([]string{"record", "--quiet", "--output", r.file, "-g"}, r.events...)
	args = append(args, "--pid", strconv.Itoa(r.pid), "--", "sleep", strconv.FormatFloat(r.time.Seconds(), 'f', 3, 64))
	out, err := perfCommand(ctx, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("perf record: %w: %s", err, strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}

// canRecord tries to record events of this process. Others than root may if kernel.perf_event_paranoid is at most paranoid; perf would
// leave out the kernel without an error. The error has what to do.
func canRecord(ctx context.Context, events []string, paranoid int) error {
	if _, err := exec.LookPath("perf"); err != nil {
		return errors.New("install perf (Debian: linux-perf)")
	}
	text, err := os.ReadFile("/proc/sys/kernel/perf_event_paranoid")
	if err != nil {
		return fmt.Errorf("the kernel has no perf events: %w", err)
	}
	if level, _ := strconv.Atoi(strings.TrimSpace(string(text))); os.Geteuid() != 0 && level > paranoid {
		return fmt.Errorf("run as root, or set kernel.perf_event_paranoid (now %d) to %d", level, paranoid)
	}
	dir, err := os.MkdirTemp("", "numbers")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	return recording{events, os.Getpid(), 0, filepath.Join(dir, "perf.data")}.make(ctx)
}

// samples calls do with each sample of a file, in the order of time.
func samples(ctx context.Context, file string, do func(sample)) error {
	cmd := perfCommand(ctx, "script", "--input", file, "--no-inline", "-F", "tid,time,event,trace,ip,sym,dso")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var problems strings.Builder // warnings too, which don't count
	cmd.Stderr = &problems
	if err := cmd.Start(); err != nil {
		return err
	}
	err = parse(out, do)
	_, _ = io.Copy(io.Discard, out) // perf must not wait
	if ended := cmd.Wait(); err == nil && ended != nil {
		err = fmt.Errorf("%w: %s", ended, problems.String())
	}
	if err != nil {
		return fmt.Errorf("perf script: %w", err)
	}
	return nil
}

// parse reads the output of perf script: for each sample a line with thread, time, event and its arguments; then a line for each
// function, indented; then an empty line.
func parse(r io.Reader, do func(sample)) error {
	var s sample
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		line := strings.TrimSpace(lines.Text())
		var err error
		switch {
		case line == "" && s.event != "":
			do(s)
			s = sample{}
		case line == "":
		case s.event == "":
			s, err = parseEvent(line)
		default:
			var f frame
			f, err = parseFrame(line)
			s.stack = append(s.stack, f)
		}
		if err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
	}
	if s.event != "" {
		do(s)
	}
	return lines.Err()
}

func parseEvent(line string) (sample, error) {
	who, what, _ := strings.Cut(line, ": ")
	_, at, ok := strings.Cut(who, " ")
	seconds, err := strconv.ParseFloat(strings.TrimSpace(at), 64)
	if !ok || err != nil {
		return sample{}, errors.New("want a thread and a time")
	}
	event, args, _ := strings.Cut(what, ": ")
	event = strings.TrimSpace(strings.TrimSuffix(event, ":"))
	return sample{at: time.Duration(seconds * 1e9), event: event, args: args}, nil
}

func parseFrame(line string) (frame, error) {
	address, rest, _ := strings.Cut(line, " ")
	symbol, file, ok := cutLast(strings.TrimSuffix(rest, ")"), " (")
	n, err := strconv.ParseUint(address, 16, 64)
	if !ok || err != nil {
		return frame{}, errors.New("want an address, a symbol and a file")
	}
	return frame{address: n, symbol: symbol, file: file}, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}
