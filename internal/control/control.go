// Package control is the local socket of a running agent: an operator asks there what stands against a device
// and says what was verified, and the agent obeys. It is HTTP with JSON over a unix socket that only the
// agent's own user can open. The verbs of both commands are here too, so that they are the same.
package control

import (
	"context"
	"log/slog"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
	"github.com/tandem-gpu/tandem/internal/report"
	"github.com/tandem-gpu/tandem/internal/watchdog"
)

// Agent is what a running agent can be asked and told. *monitor.Monitor is one; see there.
type Agent interface {
	State() core.State
	Clear(context.Context, core.Command) ([]core.Condition, error)
	Ignore(context.Context, core.Command, time.Time) ([]core.Condition, error)
	Report(...core.Observation) bool
	Quiesce(ctx context.Context, until time.Time) error
	Resume(context.Context) error
	Save(context.Context) error
	Rebind(context.Context) (was, is []core.PositionBinding, err error)
	Stats() monitor.Stats
	Watchdog() *watchdog.Registry
}

var _ Agent = (*monitor.Monitor)(nil)

// Options say how an agent is served.
type Options struct {
	Config     core.Config              // as the agent has it: what recovery waits for
	Simulation bool                     // an operator may rehearse faults
	Warnings   func() []string          // about the agent itself, for every report; nil = none
	Endpoints  func() []report.Endpoint // for the debug view; nil = none
	Log        *slog.Logger             // of every order, with who gave it; never nil
}

// ClearArgs say which conditions are over, in an operator's words.
type ClearArgs struct {
	GPU        string `json:"gpu"`        // UUID, the beginning of one, a unit's ID, PCI address or index ("0:1" = of an instance)
	Cause      string `json:"cause"`      // "XID_95", also as "xid 95" or "95"; "" = all of the GPU
	VerifiedAt string `json:"verifiedAt"` // RFC 3339; "" = now
}

// IgnoreArgs say which conditions to disregard, in an operator's words.
type IgnoreArgs struct {
	GPU        string `json:"gpu"`
	Cause      string `json:"cause"`
	VerifiedAt string `json:"verifiedAt"`
	Until      string `json:"until"` // a duration such as 4h, or RFC 3339
}

// SimulateArgs say which fault to rehearse, in an operator's words.
type SimulateArgs struct {
	Kind string `json:"kind"` // "xid" or "event"; "" = xid
	Code string `json:"code"` // of an XID its number, of an event its NVML type or name
	GPU  string `json:"gpu"`
	GI   string `json:"gi"` // of a GPU instance; "" = the whole GPU
	CI   string `json:"ci"` // of a compute instance; "" = the whole instance
}

// QuiesceArgs say for how long the driver is to be left alone, in an operator's words.
type QuiesceArgs struct {
	For string `json:"for"` // a duration such as 2h, or RFC 3339; "" = until resumed
}

// DriverStatus is where the agent is after it was told to leave the driver alone, or to take it back.
type DriverStatus struct {
	Driver  report.Driver            `json:"driver"`
	Devices map[core.HealthState]int `json:"devices"`           // by state
	Kept    bool                     `json:"kept"`              // a restart of the agent changes nothing about it
	NotKept string                   `json:"notKept,omitempty"` // why a restart of the agent does
}

// Response is what became of an order.
type Response struct {
	Conditions []report.Condition `json:"conditions"`        // that were cleared, ignored, or brought about
	Driver     []report.Condition `json:"standing"`          // others of that GPU that have an effect now
	NotKept    string             `json:"notKept,omitempty"` // why a restart of the agent undoes it; "" = it does not
}

// RefusedError is the agent's own word on why it did not obey.
type RefusedError struct {
	Status int    // as in HTTP
	Text   string // one line per reason
}

func (e *RefusedError) Error() string { return e.Text }
