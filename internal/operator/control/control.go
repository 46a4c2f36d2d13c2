// Package control is the local socket of a running agent. Over it an operator reads the agent's report and sends
// commands: clear or ignore a condition, reset a GPU, simulate a fault, quiesce and resume the driver, reload the configuration, rebind the policy. It is HTTP
// with JSON over a unix socket that only the agent's own user can open. The commands of both binaries are here too, so
// that they are the same.
package control

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/operator/explain"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watchdog"
)

// Agent is what this package needs of a running agent: the methods of a *monitor.Monitor, which are described there, and the latest
// table of a usage.Watcher.
type Agent interface {
	State() core.State
	Clear(context.Context, health.Command) ([]health.Condition, error)
	Ignore(context.Context, health.Command, time.Time) ([]health.Condition, error)
	Report(...health.Observation) bool
	Quiesce(ctx context.Context, until time.Time) error
	Resume(context.Context) error
	Save(context.Context) error
	Rebind(context.Context) (was, is []inventory.PositionBinding, err error)
	Stats() monitor.Stats
	Watchdog() *watchdog.Registry
	Use() use.Table
}

// Extender is an Agent whose orchestrator's adapter has more for a report: Extend returns r with it. It is safe for concurrent use.
type Extender interface {
	Extend(r report.Report) report.Report
}

// Options configure how an agent is served.
type Options struct {
	Config     core.Config              // of the agent: the report has its recovery periods
	Simulation bool                     // an operator may simulate faults
	Problems   func() []problem.Problem // of the agent itself, for every report; nil = none
	Endpoints  func() []report.Endpoint // for the debug view; nil = none
	Explain    explain.Adapter          // of the orchestrator; without functions, requests are not explained

	Ownership func() ownership.Facts // for the command migrate; nil = no GPU moves between APIs
	Resets    Resets                 // for the command reset; nil = no GPU is reset

	Log *slog.Logger // of every command, with the client; never nil
}

// ClearArgs select the conditions to clear.
type ClearArgs struct {
	GPU        string `json:"gpu"`        // UUID, a prefix of one, a unit's ID, PCI address or index ("0:1" = the GPU of an instance)
	Cause      string `json:"cause"`      // "XID_95", also as "xid 95" or "95"; "" = all of the GPU
	VerifiedAt string `json:"verifiedAt"` // RFC 3339; "" = now
}

// IgnoreArgs select the conditions to ignore.
type IgnoreArgs struct {
	GPU        string `json:"gpu"`        // as in ClearArgs
	Cause      string `json:"cause"`      // as in ClearArgs
	VerifiedAt string `json:"verifiedAt"` // as in ClearArgs
	Until      string `json:"until"`      // a duration such as 4h, or RFC 3339
}

// SimulateArgs describe the fault to simulate.
type SimulateArgs struct {
	Kind string `json:"kind"` // "xid" or "event"; "" = xid
	Code string `json:"code"` // of an XID its number, of an event its NVML type or name
	GPU  string `json:"gpu"`  // as in ClearArgs
	GI   string `json:"gi"`   // ID of a GPU instance; "" = the whole GPU
	CI   string `json:"ci"`   // ID of a compute instance; "" = the whole GPU instance
}

// QuiesceArgs limit a maintenance of the driver.
type QuiesceArgs struct {
	For string `json:"for"` // a duration such as 2h, or RFC 3339; "" = until resumed
}

// driverStatus is the state of the driver and its devices after Quiesce or Resume.
type driverStatus struct {
	Driver    report.Driver        `json:"driver"`
	Devices   map[health.State]int `json:"devices"`   // number by state
	Persisted bool                 `json:"persisted"` // PersistenceError is ""
	persistence
}

// response is the result of Clear, Ignore and Simulate.
type response struct {
	Conditions      []report.Condition `json:"conditions"`      // that were cleared, ignored or caused
	OtherConditions []report.Condition `json:"otherConditions"` // of that GPU that have an effect now
	persistence
}

// RefusedError is the agent's reason for rejecting a command.
type RefusedError struct {
	Status int    // of HTTP
	Text   string // one line for each reason
}

// Error returns the reasons.
func (e *RefusedError) Error() string { return e.Text }
