package nomad

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/core/use"
	"github.com/tandem-gpu/tandem/internal/node/usage"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/agentapi"
)

const (
	// answerAge is that of the latest confirmation at most, for the holders of a GPU to be known. A confirmation is as old as its query took
	// (10 s at most) when it comes, the next one is requested then at the latest, and takes as long.
	answerAge  = 25 * time.Second
	requestAge = 3 * time.Second // of the latest confirmation, for another one
)

// newAllocations returns what asks the Nomad agent which allocations have devices; nil without its address. devices are those of the node.
func newAllocations(s config.Nomad, devices func() map[gpu.DeviceID]gpu.Placement, log *slog.Logger) *agentapi.Client {
	at := s.Operations
	if at.NomadAddress == "" || s.Core.Occupancy == inventory.OccupancyOff {
		return nil
	}
	o := agentapi.Options{Address: at.NomadAddress, TokenFile: at.NomadTokenFile, Log: log, LookupEnv: os.LookupEnv}
	if at.NomadGuessed {
		o.Address, o.Devices = cmp.Or(os.Getenv("NOMAD_ADDR"), o.Address), devices // Nomad starts a plugin with its own environment
	}
	return agentapi.New(o)
}

// unread returns the record of allocations that are not read, by the settings.
func unread(s config.Nomad) usage.Holders {
	why := noAllocations
	if s.Operations.NomadAddress != "" {
		why = use.Unknown{Reason: "occupancy is off", Remedy: "set occupancy to report or withhold"}
	}
	return func(context.Context, *inventory.Allocatable) (holders.Record, error) {
		return holders.Record{Never: true, Missing: why.Reason, Remedy: why.Remedy}, nil
	}
}

// notRead is what a move waits for then.
const notRead = "the allocations of the Nomad agent, which are not read: set nomad_address, and occupancy to report or withhold; or drain the node and use --force"

// allocationReader reads the allocations that have a GPU, for the moves of GPUs between APIs.
type allocationReader struct {
	client  *agentapi.Client // nil = they are not read
	current func() *inventory.Allocatable
	leaving func() []gpu.DeviceID // GPUs that wait for the end of their work

	mu     sync.Mutex
	places map[gpu.DeviceID]gpu.Placement // of the devices that work has: see locate
}

// read reads the allocations. That nothing has a GPU counts only if the servers confirmed that after the agent gave it out last, and just now.
// They are asked while a GPU waits for the end of its work, and no work is known.
func (a *allocationReader) read() holders.Record {
	if a.client == nil {
		return holders.Record{Never: true, Missing: notRead}
	}
	confirmed := a.client.Confirmed()
	latest, err := a.client.Read(context.Background(), nil) // makes no call
	if latest.Never {
		return holders.Record{Never: true, Missing: notRead}
	}
	latest, age := a.locate(latest), time.Since(confirmed.At)
	if age > requestAge && slices.ContainsFunc(a.leaving(), func(id gpu.DeviceID) bool { return len(latest.On(id)) == 0 }) {
		a.client.Confirm()
	}
	var r holders.Record
	if err = cmp.Or(confirmed.Err, err); err != nil {
		r.Missing = "the allocations of the Nomad agent: " + err.Error()
	} else if age <= answerAge {
		r = confirmed.Record
		r.At = confirmed.At
		if r.Missing != "" {
			r.Missing = "the allocations of the Nomad agent: " + r.Missing
		}
	}
	r.Holders = slices.Concat(r.Holders, latest.Holders, a.client.Seen().Holders) // those that no answer has shown to have ended
	r = a.locate(r)
	a.keepPlaces(r)
	return r
}

// locate returns a record with the places of its devices. A device stays where it was when it was first seen with its
// work, listed or not: a MIG instance that is gone keeps its GPU until that work has ended.
func (a *allocationReader) locate(r holders.Record) holders.Record {
	placements := a.current().Placements()
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.Copy(placements, a.places)
	return r.Locate(placements)
}

// keepPlaces keeps the places of the devices in a located record, and of no others.
func (a *allocationReader) keepPlaces(located holders.Record) {
	places := map[gpu.DeviceID]gpu.Placement{}
	for i := range located.Holders {
		if h := &located.Holders[i]; h.At.GPU != "" {
			places[h.Device] = h.At
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.places = places
}
