package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// CheckpointName is the file of the kubelet's device manager in its folder of device plugins (kubeletDeviceManagerCheckpoint in
// pkg/kubelet/cm/devicemanager/types.go). The kubelet writes it after each Allocate and after each response to ListAndWatch.
const CheckpointName = "kubelet_internal_checkpoint"

// maxCheckpoint limits the size of the file in bytes, and with that the memory that reading it takes: some times as much. An entry has the Allocate
// response of a container, some kilobytes at most.
const maxCheckpoint = 8 << 20

// ErrCheckpointFormat is wrapped by the error of a checkpoint in another format than that of Kubernetes 1.20 to 1.37.
var ErrCheckpointFormat = errors.New("not in the format of Kubernetes 1.20 to 1.37")

// Checkpoint is what the kubelet's device manager has written last: the devices of all containers, ordinary init containers among them, by the
// UIDs of their pods. A pod that has ended stays in it until the kubelet has removed it from its records (UpdateAllocatedDevices: with each
// List of the pod-resources API, and before each Allocate) and then writes the file again. It is immutable.
type Checkpoint struct {
	Version uint64 // of the file, for one reader: another one means that the kubelet has written it since; 0 = not read
	Devices []CheckpointDevice
}

// CheckpointDevice is a device ID of a container.
type CheckpointDevice struct {
	PodUID    string
	Container string
	Resource  string
	ID        string
	NUMANode  int // -1 = no affinity

	MemoryLimit uint64 // of device memory with which the container was created, in bytes, by the name of a CDI device; 0 = none
}

// checkpointReader reads the file of one kubelet, each version once. It is not safe for concurrent use.
type checkpointReader struct {
	path   string
	file   statefile.Identity // of latest, or of what err is about
	latest Checkpoint
	err    error // of the content
}

// read returns the present content. With an error it is not known.
func (r *checkpointReader) read() (Checkpoint, error) {
	id := statefile.IdentityOf(r.path) // before the content: a file that is replaced meanwhile is read again
	if id == (statefile.Identity{}) || id != r.file {
		text, err := statefile.Read(r.path, maxCheckpoint, 0)
		if err != nil && !statefile.IsContent(err) {
			return Checkpoint{}, err // it may be readable the next time
		}
		var devices []CheckpointDevice
		if err == nil {
			if devices, err = parseCheckpoint(text); err != nil {
				err = fmt.Errorf("%s: %w", r.path, err)
			}
		}
		if r.file, r.err = id, err; err == nil {
			r.latest = Checkpoint{r.latest.Version + 1, devices}
		}
	}
	if r.err != nil {
		return Checkpoint{}, r.err
	}
	return r.latest, nil
}

// parseCheckpoint returns the devices in a checkpoint (pkg/kubelet/cm/devicemanager/checkpoint/checkpoint.go). A device on several NUMA
// nodes is listed once, with the lowest one. The checksum is one of Go values inside the kubelet and is not compared: the kubelet replaces the
// file atomically.
func parseCheckpoint(text []byte) ([]CheckpointDevice, error) {
	entries, err := checkpointEntries(text)
	if err != nil {
		return nil, err
	}
	var all []CheckpointDevice
	for _, e := range entries {
		if e.PodUID == "" || e.ResourceName == "" {
			return nil, fmt.Errorf("%w: an entry without PodUID or ResourceName", ErrCheckpointFormat)
		}
		listed, limit := map[string]bool{}, e.memoryLimit()
		for _, node := range slices.Sorted(maps.Keys(e.DeviceIDs)) {
			for _, id := range e.DeviceIDs[node] {
				if !listed[id] {
					listed[id] = true
					all = append(all, CheckpointDevice{e.PodUID, e.ContainerName, e.ResourceName, id, int(node), limit})
				}
			}
		}
	}
	return all, nil
}

// checkpointEntry has the devices of one resource that a container has.
type checkpointEntry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[int64][]string // by NUMA node
	AllocResp                           []byte             // the message ContainerAllocateResponse
}

func checkpointEntries(text []byte) (entries []checkpointEntry, err error) {
	var file struct {
		Data struct {
			PodDeviceEntries json.RawMessage // null without any
		}
	}
	err = json.Unmarshal(text, &file)
	if err == nil {
		err = json.Unmarshal(file.Data.PodDeviceEntries, &entries) // fails if the key is missing
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCheckpointFormat, err)
	}
	return entries, nil
}

// StoredCDIDevices returns which CDI devices of a kind are in the responses of device plugins that a checkpoint has, each once and sorted. The kubelet starts
// containers with these responses again, also after a reboot, whatever a plugin would respond now. With an error they are not known.
func StoredCDIDevices(checkpoint, kind string) (devices []string, err error) {
	text, err := statefile.Read(checkpoint, maxCheckpoint, 0)
	if err != nil {
		return nil, err
	}
	entries, err := checkpointEntries(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", checkpoint, err)
	}
	for _, e := range entries {
		names, err := e.cdiDevices()
		if err != nil {
			return nil, fmt.Errorf("%s: %w: %w", checkpoint, ErrCheckpointFormat, err)
		}
		for _, name := range names {
			if device, ok := strings.CutPrefix(name, kind+"="); ok {
				devices = append(devices, device)
			}
		}
	}
	slices.Sort(devices)
	return slices.Compact(devices), nil
}

// cdiDevices are the qualified names of the CDI devices in the response, by field or annotation.
func (e *checkpointEntry) cdiDevices() (names []string, err error) {
	var r v1beta1.ContainerAllocateResponse
	err = proto.Unmarshal(e.AllocResp, &r)
	for _, d := range r.GetCdiDevices() {
		names = append(names, d.GetName())
	}
	for _, list := range r.GetAnnotations() {
		names = append(names, strings.Split(list, ",")...)
	}
	return names, err
}

// memoryLimit is the limit of device memory in the response, by the name of a CDI device of any vendor; 0 = it has none, or can't be read.
func (e *checkpointEntry) memoryLimit() (limit uint64) {
	names, _ := e.cdiDevices()
	for _, name := range names {
		kind, device, _ := strings.Cut(name, "=")
		if bytes, ok := inventory.ParseLimit(device); ok && strings.HasSuffix(kind, "/"+inventory.LimitClass) {
			limit = bytes
		}
	}
	return limit
}
