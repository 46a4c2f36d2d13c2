package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

const (
	resumeTimeout = 3 * time.Second // for the devices to take work after Resume; a driver may take longer
	saveTimeout   = time.Second     // for the disk
)

// quiesce releases the driver, until a time if that is not zero, and checks that its library has closed all device nodes. It
// waits until the maintenance is on disk: the operator who unloads the driver next may restart the agent. If the
// maintenance has begun and is not on disk, saveErr is the reason; err contains it too, if err is not nil.
func quiesce(ctx context.Context, a Agent, until time.Time) (saveErr, err error) {
	err = a.Quiesce(ctx, until)
	if open := openDeviceNodes(); err == nil && len(open) > 0 {
		err = fmt.Errorf("maintenance has begun, but the driver's library has left open %s: stop the process to unload the driver",
			strings.Join(open, ", "))
	}
	if !a.State().Maintenance.Active(time.Now()) {
		return nil, err
	}
	if saveErr = save(ctx, a); saveErr != nil && err != nil {
		// Its text only: a slow disk must not make this a context.DeadlineExceeded.
		err = errors.Join(err, errors.New("a restart of the agent ends the maintenance: "+saveErr.Error()))
	}
	return saveErr, err
}

// save waits until the effect of a command is on disk.
func save(ctx context.Context, a Agent) error {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	return a.Save(ctx)
}

// resume opens the driver again, and waits until the end of the maintenance is on disk.
func resume(ctx context.Context, a Agent) (saveErr, err error) {
	if err := a.Resume(ctx); err != nil {
		return nil, err
	}
	return saveEnd(ctx, a), nil
}

// saveEnd is save for a command that removes something: without a store no restart can restore it.
func saveEnd(ctx context.Context, a Agent) error {
	err := save(ctx, a)
	if errors.Is(err, monitor.ErrNoStore) {
		return nil
	}
	return err
}

func (h handler) quiesce(ctx context.Context, args QuiesceArgs) (driverStatus, error) {
	var until time.Time
	if strings.TrimSpace(args.For) != "" {
		var err error
		if until, err = (argParser{h.State(), time.Now()}).until("for", args.For); err != nil {
			return driverStatus{}, err
		}
	}
	saveErr, err := quiesce(ctx, h, until)
	return newDriverStatus(h.State(), saveErr), err
}

// resume returns after the first enumeration and what must follow before work can start, such as the CDI specification, or after
// resumeTimeout: the agent continues by itself.
func (h handler) resume(ctx context.Context, _ struct{}) (driverStatus, error) {
	saveErr, err := resume(ctx, h)
	if err != nil {
		return driverStatus{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, resumeTimeout)
	defer cancel()
	s := h.State()
	for (s.Snapshot.Driver.State == gpu.DriverReleased || s.Allocatable.Provisional()) && watch.Sleep(ctx, pollInterval) {
		s = h.State()
	}
	return newDriverStatus(s, saveErr), nil
}

func newDriverStatus(s core.State, saveErr error) driverStatus {
	d := driverStatus{
		Driver: report.DescribeDriver(s.Allocatable), Devices: map[health.State]int{},
		Persisted: saveErr == nil, persistence: newPersistence(saveErr),
	}
	for u := range s.Allocatable.Devices() {
		d.Devices[u.Health.State]++
	}
	return d
}

// String describes the status in one line: "driver ready 580.95.05; devices: 7 healthy, 1 unhealthy".
func (s driverStatus) String() string {
	line := "driver " + s.Driver.State
	if s.Driver.Reason != "" {
		line += " (" + s.Driver.Reason + ")"
	} else if s.Driver.Version != "" {
		line += " " + s.Driver.Version
	}
	return line + "; devices: " + cmp.Or(report.StateCounts(s.Devices), "none")
}

func (s driverStatus) log(log *slog.Logger, command string, peer slog.Attr) {
	message := map[string]string{quiesceURL: "driver quiesced by operator", resumeURL: "driver resumed by operator"}[command]
	log.Warn(message, append(s.attrs(), "driver", s.Driver.State, peer)...)
}
