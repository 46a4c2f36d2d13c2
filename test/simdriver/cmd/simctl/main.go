// Command simctl installs simulated machines and changes them while agents run.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const usage = `usage: simctl build DIR
       simctl machines
       simctl install DIR MACHINE             a shipped machine or a machine.conf file
       simctl -machine DIR COMMAND ...        (or SIMDRIVER_MACHINE=DIR)

  show                                        machine.conf as it is
  lose N | restore N | reset N                GPU off the bus, and back
  unbind N | bind N | invalidate N            its kernel driver; the handles given out so far
  xid N CODE [GI [CI]]                        a critical error
  event N TYPE DATA [GI [CI]]                 any event, TYPE as in nvml.h
  set N KEY VALUE...                          "none" = not supported
  fail N|all CALL CODE [TIMES]                e.g. fail 3 '*' UNKNOWN
  hang N|all CALL                             until heal
  slow N|all CALL DURATION                    e.g. 200ms
  heal [N|all]...                             faults away
  faults
  mig N off|empty|PROFILE [xCOUNT] ...        e.g. mig 0 3g.40gb 1g.10gb x3
  instance UUID WORD=VALUE...                 of a MIG device: used=4096MiB, bar1_used=, index=, ecc_uncorrected=
  use N PID MIB | end PID                     a process of this host uses a GPU, or none any more
  allocate N GROUP MIB | free ID              memory of a GPU, charged to a control group (key memacct)
  reuse-group ENDED GROUP                     GROUP gets the kernel's address of a group that has ended
  limits                                      what the driver has of control groups
  smi ARGUMENT...                             what nvidia-smi does: --gpu-reset -i N, -pm 0|1 -i N ...
  install-smi PATH                            nvidia-smi of this machine as a program
  add N [KEY=VALUE]... | remove N
  driver VERSION | library VERSION | module VERSION   another version of both, or of one
  unload | load                               the kernel module; unload by force
  rmmod                                       unload, unless a process holds a device node
  holders                                     these processes
  hide | unhide                               the library file
  without SYMBOL...                           the library without these functions
  sync                                        trees after editing machine.conf by hand
  violations | calls
`

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "simctl:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	dir := os.Getenv("SIMDRIVER_MACHINE")
	if len(args) >= 2 && (args[0] == "-machine" || args[0] == "--machine") {
		dir, args = args[1], args[2:]
	}
	if len(args) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	name, args := args[0], args[1:]
	switch name {
	case "help", "-h", "--help":
		_, err := io.WriteString(out, usage)
		return err
	case "machines":
		_, err := fmt.Fprintln(out, strings.Join(simdriver.Names(), "\n"))
		return err
	case "build":
		if len(args) != 1 {
			return fmt.Errorf("build: want DIR")
		}
		path, err := simdriver.Build(ctx, args[0])
		if err == nil {
			_, err = fmt.Fprintln(out, path)
		}
		return err
	case "install":
		if len(args) != 2 {
			return fmt.Errorf("install: want DIR MACHINE")
		}
		m, err := simdriver.Install(ctx, args[0], args[1])
		if err == nil {
			_, err = fmt.Fprintln(out, m.Root)
		}
		return err
	}
	cmd, ok := commands[name]
	if !ok {
		return fmt.Errorf("unknown command %q\n%s", name, usage)
	}
	if len(args) < cmd.least || (cmd.most >= 0 && len(args) > cmd.most) {
		return fmt.Errorf("%s: wrong number of words\n%s", name, usage)
	}
	if dir == "" {
		return fmt.Errorf("%s: which machine? -machine DIR", name)
	}
	m, err := simdriver.Open(dir)
	if err != nil {
		return err
	}
	if err := checkNumbers(args, cmd.numbers); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := cmd.run(m, args, out); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// command takes least to most words; most -1 is no limit. The first words are numbers, as many as there are of them.
type command struct {
	least, most, numbers int
	run                  func(m *simdriver.Machine, w words, out io.Writer) error
}

var commands = map[string]command{
	"show":       {0, 0, 0, show},
	"lose":       onSlot((*simdriver.Machine).Lose),
	"restore":    onSlot((*simdriver.Machine).Restore),
	"reset":      onSlot((*simdriver.Machine).Reset),
	"remove":     onSlot((*simdriver.Machine).Remove),
	"unbind":     onSlot((*simdriver.Machine).Unbind),
	"bind":       onSlot((*simdriver.Machine).Bind),
	"invalidate": onSlot((*simdriver.Machine).Invalidate),
	"xid": {2, 4, 4, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.XID(w.slot(), w.number(1), w.at(2)...)
	}},
	"event": {3, 5, 5, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Event(w.slot(), w.number(1), w.number(2), w.at(3)...)
	}},
	"set": {3, -1, 1, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Set(w.slot(), w[1], strings.Join(w[2:], " "))
	}},
	"fail": {3, 4, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		times := simdriver.Always
		if len(w) == 4 {
			var err error
			if times, err = strconv.Atoi(w[3]); err != nil {
				return fmt.Errorf("%q is not a number", w[3])
			}
		}
		return m.Fail(simdriver.Target(w[0]), w[1], w[2], times)
	}},
	"hang": {2, 2, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Hang(simdriver.Target(w[0]), w[1])
	}},
	"slow": {3, 3, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		d, err := time.ParseDuration(w[2])
		if err != nil {
			return err
		}
		return m.Slow(simdriver.Target(w[0]), w[1], d)
	}},
	"heal": {0, -1, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		var targets []simdriver.Target
		for _, t := range w {
			targets = append(targets, simdriver.Target(t))
		}
		return m.Heal(targets...)
	}},
	"faults":     {0, 0, 0, lines((*simdriver.Machine).Faults)},
	"violations": {0, 0, 0, lines((*simdriver.Machine).Violations)},
	"calls":      {0, 0, 0, calls},
	"mig":        {2, -1, 1, mig},
	"instance": {2, -1, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.SetInstance(w[0], w[1:]...)
	}},
	"use": {3, 3, 3, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.UseProcess(w.slot(), int(w.number(1)), int(w.number(2))) //nolint:gosec // numbers of a person
	}},
	"end": {1, 1, 1, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.EndProcess(int(w.number(0))) //nolint:gosec // likewise
	}},
	"allocate": {3, 3, 1, func(m *simdriver.Machine, w words, out io.Writer) error {
		mib, err := strconv.ParseUint(w[2], 10, 32)
		if err != nil {
			return fmt.Errorf("%q is not a number", w[2])
		}
		a, err := m.Allocate(w.slot(), w[1], mib<<20)
		if err == nil {
			_, err = fmt.Fprintln(out, a.ID)
		}
		return err
	}},
	"free": {1, 1, 1, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Free(w[0])
	}},
	"reuse-group": {2, 2, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.ReuseGroup(w[0], w[1])
	}},
	"limits": {0, 0, 0, lines((*simdriver.Machine).Limits)},
	"smi": {1, -1, 0, func(m *simdriver.Machine, w words, out io.Writer) error {
		if status := m.SMI(context.Background(), w, out); status != 0 {
			return fmt.Errorf("exit status %d", status)
		}
		return nil
	}},
	"install-smi": {1, 1, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.InstallSMI(context.Background(), w[0])
	}},
	"add": {1, -1, 1, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Add(w.slot(), w[1:]...)
	}},
	"without": {0, -1, 0, func(m *simdriver.Machine, w words, _ io.Writer) error {
		return m.Without(w...)
	}},
	"driver":  onVersion((*simdriver.Machine).SetDriver),
	"library": onVersion((*simdriver.Machine).ReplaceLibrary),
	"module":  onVersion((*simdriver.Machine).SetModule),
	"rmmod":   plain((*simdriver.Machine).TryUnload),
	"holders": {0, 0, 0, holders},
	"unload":  plain((*simdriver.Machine).Unload),
	"load":    plain((*simdriver.Machine).Load),
	"hide":    plain((*simdriver.Machine).Hide),
	"unhide":  plain((*simdriver.Machine).Unhide),
	"sync":    plain((*simdriver.Machine).Sync),
}
