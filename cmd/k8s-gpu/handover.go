package main

import (
	"sync"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// kubeletHandover passes what the kubelet was given from one run of this process to the next, whether or not it is also on disk.
// The zero value is that of a new process. It is safe for concurrent use.
type kubeletHandover struct {
	mu        sync.Mutex
	resources []string // of all runs
	grants    []kubeadapter.StoredAllocation
	latest    *grantStore
}

// offered returns the resources that earlier runs registered.
func (h *kubeletHandover) offered() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.resources
}

// setOffered records the resources of a run, which include those of earlier runs.
func (h *kubeletHandover) setOffered(resources []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.resources = resources
}

// grantStore is the store of the device IDs that one run allocates.
type grantStore struct {
	handover *kubeletHandover
	disk     kubeadapter.AllocationStore // nil = none
}

// next returns the store of the next run, which also writes to disk unless that is nil. The stores of earlier runs save nothing
// from then on.
func (h *kubeletHandover) next(disk kubeadapter.AllocationStore) kubeadapter.AllocationStore {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.latest = &grantStore{handover: h, disk: disk}
	return h.latest
}

// Load implements kubeadapter.AllocationStore.
func (s *grantStore) Load() []kubeadapter.StoredAllocation {
	s.handover.mu.Lock()
	grants := s.handover.grants
	s.handover.mu.Unlock()
	if grants != nil || s.disk == nil {
		return grants
	}
	return s.disk.Load()
}

// Save implements kubeadapter.AllocationStore. The disk is written last, as it may hang.
func (s *grantStore) Save(grants []kubeadapter.StoredAllocation) {
	s.handover.mu.Lock()
	latest := s.handover.latest == s
	if latest {
		s.handover.grants = grants
	}
	s.handover.mu.Unlock()
	if latest && s.disk != nil {
		s.disk.Save(grants)
	}
}
