package nomadadapter

import (
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Counters are those of a plugin since its process started.
type Counters struct {
	FingerprintResponses, StatsResponses uint64
	Reservations, ReservationErrors      uint64 // calls of Reserve that succeeded, and that were refused

	// Groups are the device groups of the latest fingerprint that Nomad has taken, such as "nvidia/gpu/NVIDIA A30 (2)".
	Groups []string
}

// counters are what Counters is made from.
type counters struct {
	fingerprints, statsResponses    atomic.Uint64
	reservations, reservationErrors atomic.Uint64
	observe                         func(method string, took time.Duration)

	mu     sync.Mutex
	groups []string
}

// Counters returns the present counters.
func (p *Plugin) Counters() Counters {
	c := &p.counters
	c.mu.Lock()
	groups := c.groups
	c.mu.Unlock()
	return Counters{
		FingerprintResponses: c.fingerprints.Load(), StatsResponses: c.statsResponses.Load(),
		Reservations: c.reservations.Load(), ReservationErrors: c.reservationErrors.Load(), Groups: groups,
	}
}

// ObserveDurations makes the plugin report how long requests take: Reserve; Fingerprint from a change until Nomad has taken the fingerprint
// with it; Stats from the read of the usage until Nomad has taken the response. Call it before Serve. The function must be safe for
// concurrent use and must not block.
func (p *Plugin) ObserveDurations(observe func(method string, took time.Duration)) {
	p.counters.observe = observe
}

// fingerprinted counts a fingerprint that Nomad has taken.
func (c *counters) fingerprinted(sent []listing, changed time.Time) {
	groups := make([]string, len(sent))
	for i, l := range sent {
		groups[i] = strings.Join([]string{vendor, l.groupType, l.name}, "/") + " (" + strconv.Itoa(len(l.devices)) + ")"
	}
	c.mu.Lock()
	c.groups = groups
	c.mu.Unlock()
	c.observe("Fingerprint", time.Since(changed))
	c.fingerprints.Add(1)
}

// reserved counts a call of Reserve.
func (c *counters) reserved(began time.Time, err error) {
	c.observe("Reserve", time.Since(began))
	if err != nil {
		c.reservationErrors.Add(1)
		return
	}
	c.reservations.Add(1)
}

// GPUResource is the resource of devices that are not shared.
const GPUResource = vendor + "/" + typeExclusive

// ResourceOf returns what a job requests to get a unit, without the name of the group: "nvidia/gpu".
func ResourceOf(u inventory.Unit) string { return vendor + "/" + groupTypeOf(u.Sharing.Mode) }
