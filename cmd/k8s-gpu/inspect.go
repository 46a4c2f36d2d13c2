package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// report is what inspect prints.
type report struct {
	Driver   driverReport     `json:"driver"`
	Devices  []deviceReport   `json:"devices"`
	Excluded []excludedReport `json:"excluded"`
}

type driverReport struct {
	State   string `json:"state"`
	Version string `json:"version,omitempty"`
	CUDA    string `json:"cuda,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

type deviceReport struct {
	ID          string `json:"id"`
	Index       int    `json:"index"`
	Model       string `json:"model"`
	Profile     string `json:"profile,omitempty"`
	PCI         string `json:"pci"`
	NUMANode    int    `json:"numaNode"`
	MemoryBytes uint64 `json:"memoryBytes"`
	Schedulable bool   `json:"schedulable"`
	Health      string `json:"health"`
}

type excludedReport struct {
	Index  int    `json:"index"`
	ID     string `json:"id,omitempty"`
	PCI    string `json:"pci,omitempty"`
	Reason string `json:"reason"`
}

// inspect reads the machine once, as the agent would, and prints what it would offer. A node without a
// driver is an answer, not a failure; a driver that does not answer is given up on in time.
func inspect(ctx context.Context, s settings, out io.Writer, asJSON bool) error {
	r := describe(firstInventory(ctx, s))
	if asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	return r.print(out)
}

// firstInventory is the first one that a reading of the driver led to.
func firstInventory(ctx context.Context, s settings) *core.Inventory {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	machine := monitor.New(opener(s), s.core, slog.New(slog.DiscardHandler))
	running.Go(func() { _ = machine.Run(ctx) }) // an error is in the inventory too
	for inv := range machine.Watch(ctx) {
		if inv.Driver().State != core.DriverPending {
			return inv
		}
	}
	return machine.Current()
}

func describe(inv *core.Inventory) report {
	d := inv.Driver()
	r := report{
		Driver:  driverReport{State: d.State.String(), Version: d.Version, CUDA: d.CUDA, Reason: d.Reason},
		Devices: []deviceReport{}, Excluded: []excludedReport{},
	}
	for u := range inv.Units() {
		r.Devices = append(r.Devices, deviceReport{
			ID: string(u.ID), Index: u.Device.Index, Model: u.Device.Model, Profile: u.Device.Profile,
			PCI: string(u.Device.PCI), NUMANode: u.Device.NUMANode, MemoryBytes: u.Device.Memory,
			Schedulable: u.Health.Schedulable(), Health: u.Health.String(),
		})
	}
	for _, e := range inv.Excluded() {
		r.Excluded = append(r.Excluded, excludedReport{
			Index: e.Index, ID: string(e.At.GPU), PCI: string(e.PCI), Reason: e.Reason,
		})
	}
	return r
}

func (r report) print(out io.Writer) error {
	var b strings.Builder
	if r.Driver.State == core.DriverReady.String() {
		fmt.Fprintf(&b, "driver %s, CUDA %s, %d devices, %d excluded\n", r.Driver.Version, r.Driver.CUDA, len(r.Devices), len(r.Excluded))
	} else {
		fmt.Fprintf(&b, "driver %s: %s\n", r.Driver.State, r.Driver.Reason)
	}
	if len(r.Devices)+len(r.Excluded) > 0 {
		b.WriteString("GPU\tID\tMODEL\tPCI\tNUMA\tMEMORY\tHEALTH\n")
	}
	for _, d := range r.Devices {
		numa := "-"
		if d.NUMANode >= 0 {
			numa = strconv.Itoa(d.NUMANode)
		}
		fmt.Fprintf(&b, "%d\t%s\t%s\t%s\t%s\t%d MiB\t%s\n", d.Index, d.ID, d.Model, d.PCI, numa, d.MemoryBytes>>20, d.Health)
	}
	for _, e := range r.Excluded {
		fmt.Fprintf(&b, "%d\t%s\t\t%s\t\t\texcluded: %s\n", e.Index, e.ID, e.PCI, e.Reason)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	if _, err := io.WriteString(w, b.String()); err != nil {
		return err
	}
	return w.Flush()
}
