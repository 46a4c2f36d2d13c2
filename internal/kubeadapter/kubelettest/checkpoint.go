package kubelettest

import (
	"encoding/json"
	"os"
	"path/filepath"
)

// CheckpointEntry is an entry of the checkpoint of the kubelet's device manager.
type CheckpointEntry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[int64][]string // by NUMA node
	AllocResp                           []byte
}

// Record sets the containers with devices that the kubelet has recorded; none at first. Like a kubelet it writes its checkpoint now, after each
// Allocate and after each list of a plugin.
func (k *Kubelet) Record(entries ...CheckpointEntry) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.recorded = entries
	return k.writeCheckpoint()
}

// writeCheckpoint replaces the checkpoint in the folder of device plugins, in the format of Kubernetes 1.20 to 1.37. The caller holds mu.
func (k *Kubelet) writeCheckpoint() error { return WriteCheckpoint(k.dir, k.recorded...) }

// WriteCheckpoint replaces the checkpoint in a folder of device plugins.
func WriteCheckpoint(dir string, entries ...CheckpointEntry) error {
	var file struct {
		Data struct {
			PodDeviceEntries  []CheckpointEntry
			RegisteredDevices map[string][]string
		}
		Checksum uint64
	}
	file.Data.PodDeviceEntries = entries
	text, err := json.Marshal(file)
	if err != nil {
		return err
	}
	temporary := filepath.Join(dir, ".checkpoint") // as the kubelet: pkg/kubelet/util/store
	if err := os.WriteFile(temporary, text, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, filepath.Join(dir, "kubelet_internal_checkpoint"))
}

// Entry is an entry of one container with devices on NUMA node 0.
func Entry(uid, container, resource string, ids ...string) CheckpointEntry {
	return CheckpointEntry{PodUID: uid, ContainerName: container, ResourceName: resource, DeviceIDs: map[int64][]string{0: ids}}
}
