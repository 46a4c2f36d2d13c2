package live

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// checkInvariants checks what holds whatever happens to the machine:
//
//   - each resource was registered once, and its stream is open
//   - Nomad's stream is the first one, without an error, and every fingerprint is valid
//   - a device was listed as unhealthy before it was removed: kubelet 1.37 can panic over an ID that is removed while it is
//     allocated
//   - the name of a device's group stays, as Reserve finds running work by it
func (s *scene) checkInvariants() {
	s.t.Helper()
	s.checkRegisteredOnce()
	for resource := range s.registrations() {
		if _, connected := s.kubelet.Devices(resource); !connected {
			s.t.Errorf("%s: not connected", resource)
		}
		for _, id := range removedWhileHealthy(s.lists(resource)) {
			s.t.Errorf("%s: the kubelet lost %s while it was healthy", resource, id)
		}
	}
	s.checkNomadInvariants()
}

// checkNomadInvariants checks those that hold for Nomad also if the plugin is started again.
func (s *scene) checkNomadInvariants() {
	s.t.Helper()
	var lists []map[string]bool
	names := map[string]string{}
	all := s.nomad.fingerprints()
	for i, f := range all {
		// The end of a process is an error in the last message of its stream.
		ended := s.monitor == nil && i+1 < len(all) && all[i+1].stream > f.stream
		if err := f.check(); err != nil && !ended {
			s.t.Errorf("fingerprint %d: %v", i, err)
		}
		if f.err == nil {
			lists = append(lists, f.health())
		}
		for id, name := range f.names() {
			if before, known := names[id]; known && before != name {
				s.t.Errorf("fingerprint %d: %s was in %q and is in %q", i, id, before, name)
			}
			names[id] = name
		}
	}
	for _, id := range removedWhileHealthy(lists) {
		s.t.Errorf("Nomad lost %s while it was healthy", id)
	}
}

// checkRegisteredOnce checks that both orchestrators still have their first streams.
func (s *scene) checkRegisteredOnce() {
	s.t.Helper()
	for resource, n := range s.registrations() {
		if n != 1 {
			s.t.Errorf("%s was registered %d times", resource, n)
		}
	}
	if n := s.nomad.last().stream; n != 1 {
		s.t.Errorf("Nomad's stream is number %d", n)
	}
}

// registrations counts those of each resource.
func (s *scene) registrations() map[string]int {
	count := map[string]int{}
	for _, r := range s.kubelet.Registrations() {
		count[r.Resource]++
	}
	return count
}

// lists are all lists of a resource, as health by ID.
func (s *scene) lists(resource string) (all []map[string]bool) {
	for _, devices := range s.kubelet.Lists(resource) {
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
	m := mark{map[string]int{}, len(s.nomad.fingerprints()), time.Now()}
	for resource := range s.registrations() {
		m.lists[resource] = len(s.kubelet.Lists(resource))
	}
	return m
}

// checkUndisturbed checks that devices were healthy in everything that was received since.
func (s *scene) checkUndisturbed(what string, since mark, devices []string) {
	s.t.Helper()
	check := func(where string, n int, health map[string]bool, ids []string) {
		for _, id := range ids {
			if healthy, listed := health[id]; !healthy {
				s.t.Errorf("%s: %s, message %d: %s is listed: %t, healthy: %t", what, where, n, id, listed, healthy)
			}
		}
	}
	for i, f := range s.nomad.fingerprints()[since.fingerprints:] {
		check("Nomad", i, f.health(), devices)
	}
	resource, _ := s.resources()
	byResource := map[string][]string{}
	for _, id := range devices {
		byResource[resource[id]] = append(byResource[resource[id]], id)
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
	s.t.Helper()
	for _, name := range resources {
		all := s.lists(name)
		for i := since.lists[name]; i < len(all); i++ {
			if i > 0 && fmt.Sprint(all[i]) != fmt.Sprint(all[i-1]) {
				s.t.Errorf("%s: %s: list %v after %v", what, name, all[i], all[i-1])
			}
		}
		if n := len(all) - since.lists[name]; n > 2+int(2*time.Since(since.at).Seconds()) {
			s.t.Errorf("%s: %d lists of %s, which has not changed", what, n, name)
		}
	}
}

// checkAllocatable checks that a container of either orchestrator gets each device, or the device of the share, and only that.
func (s *scene) checkAllocatable(what string, ids ...string) {
	s.t.Helper()
	resource, _ := s.resources()
	for _, id := range ids {
		device, _, _ := strings.Cut(id, "::")
		r, err := s.kubelet.Allocate(s.t.Context(), resource[id], id)
		if err != nil || r.GetEnvs()["NVIDIA_VISIBLE_DEVICES"] != device {
			s.t.Errorf("%s: Allocate(%s): %v, %v", what, id, r, err)
		}
		n, err := s.nomad.reserve(id)
		if err != nil || n.Envs["NVIDIA_VISIBLE_DEVICES"] != device {
			s.t.Errorf("%s: Reserve(%s): %v, %v", what, id, n, err)
		}
	}
}

// checkNotReservable checks that Nomad can't reserve a removed unit.
func (s *scene) checkNotReservable(what string, ids ...string) {
	s.t.Helper()
	for _, id := range ids {
		_, err := s.nomad.reserve(id)
		if err == nil || !strings.Contains(err.Error(), "unknown device IDs: "+id) && !strings.Contains(err.Error(), id+" is unhealthy: no longer offered") {
			s.t.Errorf("%s: Reserve(%s): %v", what, id, err)
		}
	}
}

// groupsOf are the attributes of the groups of devices.
func (s *scene) groupsOf(devices []string) map[string]string {
	groups := map[string]string{}
	for _, id := range devices {
		g := s.nomad.last().group(s.t, id)
		var attributes []string
		for key, a := range g.Attributes {
			attributes = append(attributes, key+"="+a.GoString())
		}
		slices.Sort(attributes)
		groups[g.Name] = strings.Join(attributes, " ")
	}
	return groups
}

// checkCapacity checks how many devices of a resource the kubelet can allocate.
func (s *scene) checkCapacity(what, resource string, want int) {
	s.t.Helper()
	_, allocatable := s.kubelet.Capacity(resource)
	if _, connected := s.kubelet.Devices(resource); allocatable != want || !connected {
		s.t.Errorf("%s: %s: allocatable %d, connected %t; want %d", what, resource, allocatable, connected, want)
	}
}

// awaitEmpty waits until nothing but the machine's units is listed, and checks that the kubelet has no capacity of a resource.
func (s *scene) awaitEmpty(resource string) {
	s.t.Helper()
	s.awaitUnits("former units are removed", time.Now(), s.units())
	if capacity, _ := s.kubelet.Capacity(resource); capacity != 0 {
		s.t.Errorf("%s: capacity %d", resource, capacity)
	}
}
