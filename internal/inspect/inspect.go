// Package inspect shows an operator what an agent offers: the same words for both agents, as a table and
// as JSON.
package inspect

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"text/tabwriter"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// Read asks the driver once, through the monitor that an agent would run, and returns the first inventory
// that follows: at the latest after the configuration's call deadline, if the driver hangs, or when ctx
// ends. A machine without a driver is an answer and not an error.
func Read(ctx context.Context, open func() (monitor.Session, error), cfg core.Config) *core.Inventory {
	ctx, cancel := context.WithCancel(ctx)
	m := monitor.New(open, cfg, slog.New(slog.DiscardHandler), nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = m.Run(ctx) // why it ended early is in the inventory too
	}()
	defer func() {
		cancel()
		<-ended
	}()
	for inv := range m.Watch(ctx) {
		if inv.Driver().State != core.DriverPending {
			return inv
		}
	}
	return m.Current()
}

// Report is an inventory in an operator's words. Its JSON is a promise to scripts: keys are added, never
// changed.
type Report struct {
	Driver   Driver     `json:"driver"`
	Devices  []Device   `json:"devices"`
	Excluded []Excluded `json:"excluded"`
}

// Driver is the state of the driver.
type Driver struct {
	State   string `json:"state"` // pending, absent, failed, ready
	Version string `json:"version,omitempty"`
	CUDA    string `json:"cuda,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// Device is one unit on offer, well or not.
type Device struct {
	ID          core.UnitID     `json:"id"`
	Index       int             `json:"index"`
	Model       string          `json:"model"`
	Profile     string          `json:"profile,omitempty"` // of a MIG instance
	PCI         core.PCIAddress `json:"pci"`
	NUMANode    int             `json:"numaNode"` // -1 = none
	MemoryBytes uint64          `json:"memoryBytes"`
	Schedulable bool            `json:"schedulable"`
	Health      string          `json:"health"` // the line that both orchestrators' operators see
}

// Excluded is a device that was seen and is not offered.
type Excluded struct {
	Index  int             `json:"index"`
	ID     string          `json:"id,omitempty"`
	PCI    core.PCIAddress `json:"pci,omitempty"`
	Reason string          `json:"reason"`
}

// Describe puts an inventory into words.
func Describe(inv *core.Inventory) Report {
	d := inv.Driver()
	r := Report{
		Driver:  Driver{State: d.State.String(), Version: d.Version, CUDA: d.CUDA, Reason: d.Reason},
		Devices: []Device{}, Excluded: []Excluded{},
	}
	for u := range inv.Units() {
		r.Devices = append(r.Devices, Device{
			ID: u.ID, Index: u.Device.Index, Model: u.Device.Model, Profile: u.Device.Profile,
			PCI: u.Device.PCI, NUMANode: u.Device.NUMANode, MemoryBytes: u.Device.Memory,
			Schedulable: u.Health.Schedulable(), Health: u.Health.String(),
		})
	}
	for _, e := range inv.Excluded() {
		x := Excluded{Index: e.Index, PCI: e.PCI, Reason: e.Reason}
		if e.At.GPU != "" {
			x.ID = e.At.String()
		}
		r.Excluded = append(r.Excluded, x)
	}
	return r
}

// WriteJSON writes the report for programs.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteTable writes the report for people.
func (r Report) WriteTable(w io.Writer) error {
	if r.Driver.Reason != "" {
		fmt.Fprintf(w, "driver %s: %s\n", r.Driver.State, r.Driver.Reason)
	} else {
		fmt.Fprintf(w, "driver %s %s, CUDA %s, %d devices, %d excluded\n",
			r.Driver.State, r.Driver.Version, r.Driver.CUDA, len(r.Devices), len(r.Excluded))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(r.Devices)+len(r.Excluded) > 0 {
		fmt.Fprintln(t, "GPU\tID\tMODEL\tPCI\tNUMA\tMEMORY\tHEALTH")
	}
	for _, d := range r.Devices {
		numa := "-"
		if d.NUMANode >= 0 {
			numa = strconv.Itoa(d.NUMANode)
		}
		fmt.Fprintf(t, "%d\t%s\t%s\t%s\t%s\t%d MiB\t%s\n", d.Index, d.ID, d.Model, d.PCI, numa, d.MemoryBytes>>20, d.Health)
	}
	for _, e := range r.Excluded {
		fmt.Fprintf(t, "%d\t%s\t-\t%s\t-\t-\tnot offered: %s\n", e.Index, dash(e.ID), dash(string(e.PCI)), e.Reason)
	}
	return t.Flush()
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
