package deviceplugin

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/check"
)

const podGPUs = 4

// pod is a pod with one GPU, which an ordinary init container has: then only the kubelet's checkpoint shows it.
type pod struct {
	name, id string
	init     bool
}

func (p pod) entry() kubelettest.CheckpointEntry {
	container := "main"
	if p.init {
		container = "init"
	}
	return kubelettest.Entry("uid-of-"+p.name, container, kubeadapter.GPUResource, p.id)
}

// podStorm is a kubelet that admits pods, and at times loses that it has given a device out.
type podStorm struct {
	*rig
	api     *kubelettest.PodResources
	random  *rand.Rand
	running map[string]pod // by device ID
	log     []string
}

func (s *podStorm) note(format string, args ...any) {
	s.log = append(s.log, fmt.Sprintf(format, args...))
	s.log = s.log[max(0, len(s.log)-40):]
}

// record has the kubelet write what it has.
func (s *podStorm) record() {
	var entries []kubelettest.CheckpointEntry
	for _, id := range slices.Sorted(maps.Keys(s.running)) {
		entries = append(entries, s.running[id].entry())
	}
	check.NoError(s, s.kubelet.Record(entries...))
}

// admit admits a pod. Of the devices that the kubelet takes for free it chooses the one that the agent prefers; lost are those of pods, of which it
// has lost that they have them.
func (s *podStorm) admit(p pod, lost []string) {
	var free []string
	for _, id := range gpuIDs(0, 1, 2, 3) {
		if _, held := s.running[id]; !held {
			free = append(free, id)
		}
	}
	available := slices.Concat(free, lost)
	if len(available) == 0 {
		return
	}
	preferred, err := s.kubelet.Prefer(s.ctx, kubeadapter.GPUResource, available, nil, 1)
	check.NoError(s, err)
	p.id = preferred[0]
	_, err = s.kubelet.Allocate(s.ctx, kubeadapter.GPUResource, p.id)
	holder, held := s.running[p.id]
	s.note("%+v is admitted, free %v, lost %v: %v", p, free, lost, err)
	switch {
	case len(free) > 0 && (held || err != nil):
		s.Fatalf("%+v gets what %+v has, although %v are free: %v\n%q", p, holder, free, err, s.log)
	case held && err == nil:
		s.Fatalf("%+v and %+v have one device\n%q", p, holder, s.log)
	case err != nil:
		return
	}
	s.running[p.id] = p
	s.record()
	if p.init {
		s.api.Hold("default/"+p.name, "nvidia.com/other")
	} else {
		s.api.Hold("default/"+p.name, kubeadapter.GPUResource, p.id)
		s.awaitPod(p.id, "default/"+p.name)
	}
}

// end ends a pod. Its device is free when the kubelet shows that, and not before.
func (s *podStorm) end(p pod) {
	s.note("%+v ends", p)
	delete(s.running, p.id)
	s.api.Forget("default/" + p.name)
	if s.random.IntN(2) == 0 { // a kubelet writes its checkpoint late
		s.awaitQueries(s.api)
	}
	s.record()
	check.Until(s, "the device of a pod that has ended is free", func() bool { s.plugins.pods.Request(); return len(s.held(p.id)) == 0 })
}

func (s *podStorm) held(id string) []string {
	return s.plugins.Record().On(coretest.GPU(slices.Index(gpuIDs(0, 1, 2, 3), id)))
}

// holders are the devices of pods whose containers the kubelet lists, and all devices of pods.
func (s *podStorm) holders() (main, all []string) {
	for _, id := range slices.Sorted(maps.Keys(s.running)) {
		if all = append(all, id); !s.running[id].init {
			main = append(main, id)
		}
	}
	return main, all
}

func (s *podStorm) step(n int) {
	main, all := s.holders()
	p := pod{name: fmt.Sprint("p", n), init: s.random.IntN(2) == 0}
	switch r := s.random.IntN(12); {
	case r < 4:
		s.admit(p, nil)
	case r < 6 && len(all) < podGPUs: // the device of an init container can't be refused: neither a list nor Get has it
		s.admit(p, all)
	case r < 6:
		s.admit(p, main)
	case r < 9:
		for _, id := range all {
			if s.random.IntN(3) == 0 {
				s.end(s.running[id])
			}
		}
	case r == 9:
		s.note("the kubelet does not answer for a while")
		s.api.Fail(errors.New("not now"))
		s.plugins.pods.Request()
		check.Until(s, "a failure", func() bool { return s.plugins.pods.Latest().Err != nil })
		if len(all) < podGPUs {
			s.admit(pod{name: p.name, init: true}, nil)
		}
		s.api.Fail(nil)
		s.awaitAnswer()
	case r == 10:
		s.note("the agent restarts")
		s.stop()
		check.Until(s, "the kubelet has disconnected the plugin", func() bool { _, connected := s.kubelet.Devices(kubeadapter.GPUResource); return !connected })
		s.startAgent()
	case r == 11:
		s.note("the kubelet restarts")
		s.api.Close()
		s.restartKubelet(s.random.IntN(2) == 0)
		s.serve()
		s.awaitAgent()
	}
	for id, p := range s.running {
		if len(s.holdersOn(gpu.WholeGPU(coretest.GPU(slices.Index(gpuIDs(0, 1, 2, 3), id))))) == 0 {
			s.Fatalf("the device of %+v is free\n%q", p, s.log)
		}
	}
}

func (s *podStorm) startAgent() {
	s.startTracking(gpus(podGPUs))
	s.awaitAgent()
}

// awaitAgent waits until the agent offers all devices, and has the pods that the kubelet lists.
func (s *podStorm) awaitAgent() {
	s.awaitHealthy(kubeadapter.GPUResource, podGPUs)
	s.awaitReady()
	s.awaitAnswer()
	main, _ := s.holders()
	for _, id := range main {
		s.awaitPod(id, "default/"+s.running[id].name)
	}
}

func (s *podStorm) awaitAnswer() {
	s.plugins.pods.Request()
	began := time.Now()
	check.Until(s, "an answer", func() bool { r := s.plugins.pods.Latest(); return r.Err == nil && r.Began.After(began) })
}

// serve serves the API with the pods that run.
func (s *podStorm) serve() {
	api, err := kubelettest.ServePodResources(s.podSocket())
	check.NoError(s, err)
	s.api = api
	for _, p := range s.running {
		if p.init {
			api.Hold("default/"+p.name, "nvidia.com/other")
		} else {
			api.Hold("default/"+p.name, kubeadapter.GPUResource, p.id)
		}
	}
}

// Pods begin and end, some with their device in an ordinary init container; the kubelet loses what it has given out, restarts and fails to answer, and
// the agent restarts: no device has two holders, and none is refused while another one is free.
func runPodStorm(t *testing.T, random *rand.Rand, steps int) {
	s := &podStorm{rig: newRigFor(t, time.Hour), random: random, running: map[string]pod{}}
	s.startKubelet()
	s.serve()
	t.Cleanup(func() { s.api.Close() })
	s.record()
	s.startAgent()
	for n := range steps {
		s.step(n)
	}
	for _, p := range s.running {
		s.end(p)
	}
}
