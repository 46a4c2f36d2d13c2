package live

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/rig"
)

// checkInvariants checks what holds whatever happens to the machine:
//
//   - each resource was registered once, and its stream is open
//   - Nomad's stream is without an error, and every fingerprint is valid
//   - a device was listed as unhealthy before it was removed: kubelet 1.37 can panic over an ID that is removed while it is
//     allocated
//   - the name of a device's group stays, as Reserve finds running work by it
func (s *scene) checkInvariants() {
	s.T.Helper()
	for resource, n := range s.registrations() {
		if n != 1 {
			s.T.Errorf("%s was registered %d times", resource, n)
		}
		if _, connected := s.Kubelet.Devices(resource); !connected {
			s.T.Errorf("%s: not connected", resource)
		}
		for _, id := range removedWhileHealthy(s.lists(resource)) {
			s.T.Errorf("%s: the kubelet lost %s while it was healthy", resource, id)
		}
	}
	var lists []map[string]bool
	names := map[string]string{}
	for i, f := range s.Nomad.Fingerprints() {
		if err := f.Check(); err != nil {
			s.T.Errorf("fingerprint %d: %v", i, err)
		}
		lists = append(lists, health(f.Devices()))
		for id, v := range f.Devices() {
			if before, known := names[id]; known && before != v.Name {
				s.T.Errorf("fingerprint %d: %s was in %q and is in %q", i, id, before, v.Name)
			}
			names[id] = v.Name
		}
	}
	for _, id := range removedWhileHealthy(lists) {
		s.T.Errorf("Nomad lost %s while it was healthy", id)
	}
}

// health is each device's health, by ID.
func health(devices map[string]rig.View) map[string]bool {
	health := map[string]bool{}
	for id, v := range devices {
		health[id] = v.Healthy
	}
	return health
}

// registrations counts those of each resource.
func (s *scene) registrations() map[string]int {
	count := map[string]int{}
	for _, r := range s.Kubelet.Registrations() {
		count[r.Resource]++
	}
	return count
}

// lists are all lists of a resource, as health by ID.
func (s *scene) lists(resource string) (all []map[string]bool) {
	for _, devices := range s.Kubelet.Lists(resource) {
		health := map[string]bool{}
		for _, d := range devices {
			health[d.GetID()] = d.GetHealth() == v1beta1.Healthy
		}
		all = append(all, health)
	}
	return all
}

// removedWhileHealthy are the devices that were healthy in the last list that had them.
func removedWhileHealthy(lists []map[string]bool) (ids []string) {
	for i := 1; i < len(lists); i++ {
		for id, healthy := range lists[i-1] {
			if _, listed := lists[i][id]; healthy && !listed {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// mark is a position in what the orchestrators have received.
type mark struct {
	lists        map[string]int // of each resource
	fingerprints int
	at           time.Time
}

func (s *scene) mark() mark {
	m := mark{map[string]int{}, len(s.Nomad.Fingerprints()), time.Now()}
	for resource := range s.registrations() {
		m.lists[resource] = len(s.Kubelet.Lists(resource))
	}
	return m
}

// checkUndisturbed checks that devices were healthy in everything that was received since.
func (s *scene) checkUndisturbed(what string, since mark, devices []string) {
	s.T.Helper()
	check := func(where string, n int, health map[string]bool, ids []string) {
		for _, id := range ids {
			if healthy, listed := health[id]; !healthy {
				s.T.Errorf("%s: %s, message %d: %s is listed: %t, healthy: %t", what, where, n, id, listed, healthy)
			}
		}
	}
	for i, f := range s.Nomad.Fingerprints()[since.fingerprints:] {
		check("Nomad", i, health(f.Devices()), devices)
	}
	now, byResource := s.KubeletDevices(), map[string][]string{}
	for _, id := range devices {
		byResource[now[id].Name] = append(byResource[now[id].Name], id)
	}
	for name, ids := range byResource {
		for i, list := range s.lists(name)[since.lists[name]:] {
			check("kubelet, "+name, i, list, ids)
		}
	}
}

// checkNoUpdate checks that the lists of resources have not changed since. A heartbeat may have repeated the last one, and the agent repeats a
// list twice a second while the kubelet's checkpoint is to show whether a pod has ended.
func (s *scene) checkNoUpdate(what string, since mark, resources ...string) {
	s.T.Helper()
	for _, name := range resources {
		all := s.lists(name)
		for i := since.lists[name]; i < len(all); i++ {
			if i > 0 && fmt.Sprint(all[i]) != fmt.Sprint(all[i-1]) {
				s.T.Errorf("%s: %s: list %v after %v", what, name, all[i], all[i-1])
			}
		}
		if n := len(all) - since.lists[name]; n > 2+int(2*time.Since(since.at).Seconds()) {
			s.T.Errorf("%s: %d lists of %s, which has not changed", what, n, name)
		}
	}
}

// checkAllocatable checks that a container of either orchestrator gets each device, or the device of the share, and only that.
func (s *scene) checkAllocatable(what string, ids ...string) {
	s.T.Helper()
	for _, id := range ids {
		device, _, _ := strings.Cut(id, "::")
		for call, grant := range map[string]func(...string) (rig.Grant, error){"Allocate": s.Orchestrators.Allocate, "Reserve": s.Nomad.Reserve} {
			if g, err := grant(id); err != nil || g.Env[inventory.VisibleDevices] != device {
				s.T.Errorf("%s: %s(%s): %v, %v", what, call, id, g, err)
			}
		}
	}
}

// checkNotReservable checks that Nomad can't reserve a removed unit.
func (s *scene) checkNotReservable(what string, ids ...string) {
	s.T.Helper()
	for _, id := range ids {
		_, err := s.Nomad.Reserve(id)
		if err == nil || !strings.Contains(err.Error(), "unknown device IDs: "+id) && !strings.Contains(err.Error(), id+" is unhealthy: no longer offered") {
			s.T.Errorf("%s: Reserve(%s): %v", what, id, err)
		}
	}
}

// groupsOf are the attributes of the groups of devices.
func (s *scene) groupsOf(devices []string) map[string]string {
	groups := map[string]string{}
	for _, g := range s.Nomad.Groups() {
		if slices.ContainsFunc(g.Devices, func(d *device.Device) bool { return slices.Contains(devices, d.ID) }) {
			var attributes []string
			for key, a := range g.Attributes {
				attributes = append(attributes, key+"="+a.GoString())
			}
			slices.Sort(attributes)
			groups[g.Name] = strings.Join(attributes, " ")
		}
	}
	return groups
}

// checkCapacity checks how many devices of a resource the kubelet can allocate.
func (s *scene) checkCapacity(what, resource string, want int) {
	s.T.Helper()
	_, allocatable := s.Kubelet.Capacity(resource)
	if _, connected := s.Kubelet.Devices(resource); allocatable != want || !connected {
		s.T.Errorf("%s: %s: allocatable %d, connected %t; want %d", what, resource, allocatable, connected, want)
	}
}
