package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/report"
)

// resumeAtMost is how long a resumed agent is given for its first reading before it answers; a driver may take
// longer.
const resumeAtMost = 3 * time.Second

// OpenFilesError says that the driver's library left files open when it was shut down.
type OpenFilesError struct{ Paths []string }

func (e *OpenFilesError) Error() string {
	return "maintenance has begun, but the driver's library has left open " + strings.Join(e.Paths, ", ") +
		": stop the process if that must not be"
}

// keepAtMost is how long an answer waits for the disk.
const keepAtMost = time.Second

// quiesce leaves the driver alone, until a time if that is not zero, and checks that nothing of it is open. It is on
// disk before the answer: the operator who unloads the driver next may well end the agent, too. If the maintenance has
// begun and is not on disk, notKept says why; it is in err as well, if there is one.
func quiesce(ctx context.Context, a Agent, until time.Time) (notKept, err error) {
	err = a.Quiesce(ctx, until)
	if open := driverFiles(); err == nil && len(open) > 0 {
		err = &OpenFilesError{open}
	}
	if !a.State().Maintenance.Active(time.Now()) {
		return nil, err
	}
	if notKept = keep(ctx, a); notKept != nil && err != nil {
		// In words: that the disk is slow must not make of it an order that was given up for lack of time.
		err = errors.Join(err, errors.New("a restart of the agent ends the maintenance: "+notKept.Error()))
	}
	return notKept, err
}

// keep waits until what was ordered is on disk.
func keep(ctx context.Context, a Agent) error {
	ctx, cancel := context.WithTimeout(ctx, keepAtMost)
	defer cancel()
	return a.Save(ctx)
}

// resume takes the driver back, which is on disk, too, before the answer.
func resume(ctx context.Context, a Agent) (notKept, err error) {
	if err := a.Resume(ctx); err != nil {
		return nil, err
	}
	return keepEnd(ctx, a), nil
}

// keepEnd is keep for something that is over. Where there is no store nothing of it can come back.
func keepEnd(ctx context.Context, a Agent) error {
	err := keep(ctx, a)
	if errors.Is(err, monitor.ErrNoStore) {
		return nil
	}
	return err
}

func (d desk) quiesce(ctx context.Context, args QuiesceArgs) (DriverStatus, error) {
	var until time.Time
	if strings.TrimSpace(args.For) != "" {
		var err error
		if until, err = (words{d.State(), time.Now()}).until(args.For); err != nil {
			if wrong, ok := errors.AsType[*core.ConfigError](err); ok {
				wrong.Key = "for"
			}
			return DriverStatus{}, err
		}
	}
	notKept, err := quiesce(ctx, d, until)
	return standing(d.State(), notKept), err
}

// resume answers when the driver was asked again.
func (d desk) resume(ctx context.Context, _ struct{}) (DriverStatus, error) {
	notKept, err := resume(ctx, d)
	if err != nil {
		return DriverStatus{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, resumeAtMost)
	defer cancel()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for d.State().Snapshot.Driver.State == core.DriverReleased {
		select {
		case <-look.C:
		case <-ctx.Done():
			return standing(d.State(), notKept), nil // it goes on by itself
		}
	}
	return standing(d.State(), notKept), nil
}

func standing(s core.State, notKept error) DriverStatus {
	st := DriverStatus{Driver: report.Describe(s.Inventory).Driver, Devices: map[core.HealthState]int{}, Kept: notKept == nil}
	if notKept != nil {
		st.NotKept = notKept.Error()
	}
	for u := range s.Inventory.Devices() {
		st.Devices[u.Health.State]++
	}
	return st
}

// String is the standing in a line: "driver ready 580.95.05; devices: 7 healthy, 1 unhealthy".
func (s DriverStatus) String() string {
	text := "driver " + s.Driver.State
	if s.Driver.Reason != "" {
		text += " (" + s.Driver.Reason + ")"
	} else if s.Driver.Version != "" {
		text += " " + s.Driver.Version
	}
	var counts []string
	for state := core.Healthy; state <= core.GPULost; state++ {
		if n := s.Devices[state]; n > 0 {
			counts = append(counts, fmt.Sprintf("%d %s", n, state))
		}
	}
	if counts == nil {
		counts = []string{"none"}
	}
	return text + "; devices: " + strings.Join(counts, ", ")
}

func (s DriverStatus) log(log *slog.Logger, order string, by slog.Attr) {
	said := map[string]string{quiesceURL: "operator quiesced the driver", resumeURL: "operator resumed the driver"}[order]
	args := []any{"driver", s.Driver.State, "kept", s.Kept}
	if !s.Kept {
		args = append(args, "reason", s.NotKept)
	}
	log.Warn(said, append(args, by)...)
}

// driverFiles are NVIDIA's device nodes that this process has open (proc(5): /proc/self/fd).
func driverFiles() []string {
	links, _ := filepath.Glob("/proc/self/fd/*") // its only error is a bad pattern
	var open []string
	for _, link := range links {
		if path, err := os.Readlink(link); err == nil && strings.Contains(path, "/dev/nvidia") {
			open = append(open, path)
		}
	}
	slices.Sort(open)
	return slices.Compact(open)
}
