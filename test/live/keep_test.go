package live

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// keepsItsWord checks what must hold whatever happened to the machine:
//
//   - each resource was registered once and its stream is open: no change restarts anything
//   - Nomad's stream is the first one, without an error, and every message of it is valid
//   - a device that left was listed as unhealthy before: kubelet 1.37 can panic over an ID that vanishes
//     while it hands it out
//   - a device kept its group's name for as long as Nomad knew it: Reserve finds running work by that name
func (s *scene) keepsItsWord() {
	s.t.Helper()
	for resource, n := range s.registered() {
		if _, connected := s.kubelet.Devices(resource); n != 1 || !connected {
			s.t.Errorf("%s: registered %d times; connected: %v", resource, n, connected)
		}
		for _, id := range dropped(s.lists(resource)) {
			s.t.Errorf("%s: the kubelet lost %s while it was healthy", resource, id)
		}
	}
	s.nomadKeepsItsWord()
	if told := s.nomad.told(); len(told) > 0 && told[len(told)-1].stream != 1 {
		s.t.Error("Nomad's stream ended")
	}
}

// nomadKeepsItsWord is what holds on Nomad's side over restarts of the plugin, too.
func (s *scene) nomadKeepsItsWord() {
	s.t.Helper()
	var lists []map[string]bool
	names := map[string]string{}
	told := s.nomad.told()
	for i, f := range told {
		if err := f.check(); err != nil && (s.monitor != nil || !f.lastOfStream(told[i+1:])) {
			s.t.Errorf("fingerprint %d: %v", i, err)
		}
		if f.err == nil { // the end of a process says nothing of devices
			lists = append(lists, f.health())
		}
		for id, name := range f.names() {
			if old, known := names[id]; known && old != name && !slices.Contains(s.renamed, id) {
				s.t.Errorf("fingerprint %d: %s was in %q and is in %q", i, id, old, name)
			}
			names[id] = name
		}
	}
	for _, id := range dropped(lists) {
		s.t.Errorf("Nomad lost %s while it was healthy", id)
	}
}

// registered counts the registrations of each resource.
func (s *scene) registered() map[string]int {
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

// dropped are the devices that were healthy in the last list that had them.
func dropped(lists []map[string]bool) (ids []string) {
	for i := 1; i < len(lists); i++ {
		for id, healthy := range lists[i-1] {
			if _, still := lists[i][id]; healthy && !still {
				ids = append(ids, id)
			}
		}
	}
	return ids
}

// mark is a moment in what the orchestrators were told.
type mark struct {
	lists  map[string]int // of each resource
	prints int
}

func (s *scene) mark() mark {
	m := mark{map[string]int{}, len(s.nomad.told())}
	for resource := range s.registered() {
		m.lists[resource] = len(s.kubelet.Lists(resource))
	}
	return m
}

// undisturbed checks that devices were listed as healthy in everything that was said since.
func (s *scene) undisturbed(what string, since mark, devices []string) {
	s.t.Helper()
	for i, f := range s.nomad.told()[since.prints:] {
		s.well(fmt.Sprintf("%s: Nomad, message %d", what, i), f.health(), devices)
	}
	for name, own := range s.byResource(devices) {
		for i, list := range s.lists(name)[since.lists[name]:] {
			s.well(fmt.Sprintf("%s: kubelet, message %d of %s", what, i, name), list, own)
		}
	}
}

func (s *scene) well(where string, list map[string]bool, devices []string) {
	s.t.Helper()
	for _, id := range devices {
		if healthy, listed := list[id]; !healthy {
			s.t.Errorf("%s: %s is listed: %v, healthy: %v", where, id, listed, healthy)
		}
	}
}

// byResource sorts devices by the resource that they are of now.
func (s *scene) byResource(devices []string) map[string][]string {
	resource, _ := s.resources()
	by := map[string][]string{}
	for _, id := range devices {
		by[resource[id]] = append(by[resource[id]], id)
	}
	return by
}

// silent checks that nothing new was said about resources since: not a message, but for a heartbeat that
// repeats the last.
func (s *scene) silent(what string, since mark, resources ...string) {
	s.t.Helper()
	for _, name := range resources {
		all := s.lists(name)
		for i := since.lists[name]; i < len(all); i++ {
			if i > 0 && fmt.Sprint(all[i]) != fmt.Sprint(all[i-1]) {
				s.t.Errorf("%s: %s was told %v after %v", what, name, all[i], all[i-1])
			}
		}
		if n := len(all) - since.lists[name]; n > 2 {
			s.t.Errorf("%s: %d messages about %s, which has not changed", what, n, name)
		}
	}
}

// granted checks that each side would give work the device, or the share's device, and only that.
func (s *scene) granted(what string, ids ...string) {
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

// groupsOf are the groups that have devices, without the devices.
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

// capacity checks how many devices of a resource the kubelet has.
func (s *scene) capacity(what, resource string, want int) {
	s.t.Helper()
	capacity, allocatable := s.kubelet.Capacity(resource)
	if _, connected := s.kubelet.Devices(resource); capacity != want || allocatable != want || !connected {
		s.t.Errorf("%s: %s: capacity %d, allocatable %d, connected %v; want %d", what, resource, capacity, allocatable, connected, want)
	}
}
