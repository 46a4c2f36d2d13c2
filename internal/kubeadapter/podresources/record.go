package podresources

import (
	"cmp"
	"os"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
)

// PodLogs is the kubelet's default folder of logs (podLogsDir), in which each pod has a folder "NAMESPACE_NAME_UID".
const PodLogs = "/var/log/pods"

// podUIDs returns the UIDs of the pods with a folder of logs, by "namespace/name". The folder of a pod exists from before its
// first container until after its last: two pods of one name may have one. Neither part of a name has a "_".
func podUIDs(folder string) map[string][]string {
	uids := map[string][]string{}
	entries, _ := os.ReadDir(folder)
	for _, e := range entries {
		if parts := strings.Split(e.Name(), "_"); len(parts) == 3 && e.IsDir() {
			pod := parts[0] + "/" + parts[1]
			uids[pod] = append(uids[pod], parts[2])
		}
	}
	return uids
}

// Record is a reading as a record of the work that has devices of an inventory. The UIDs of pods are from the kubelet's checkpoint, and from a
// folder such as PodLogs; "" or missing = only from the checkpoint. The owner of a pod whose UID is not certain has none.
func (r Reading) Record(inv *inventory.Allocatable, podLogs string) holders.Record {
	record := holders.Record{Complete: r.Complete, AllWork: r.Complete, Work: map[string]holders.Work{}}
	uids := podUIDs(podLogs)
	for _, pod := range r.Answer.Names {
		for _, uid := range uids[pod] {
			o := ownerOf(pod, "")
			o.ID = uid
			record.Work[uid] = o
		}
	}
	owner := func(pod, container string) holders.Work {
		o := ownerOf(pod, container)
		if of := uids[pod]; len(of) == 1 {
			o.ID = of[0]
		}
		return o
	}
	checkpointed := map[Device]CheckpointDevice{} // by container, resource and ID
	for _, d := range r.Checkpoint.Devices {
		checkpointed[Device{Container: d.Container, Resource: d.Resource, ID: d.ID}] = d
	}
	for _, d := range r.Answer.Devices {
		unit := inventory.UnitID(d.ID)
		device, _ := unit.Split()
		o := owner(d.Pod, d.Container)
		c := checkpointed[Device{Container: d.Container, Resource: d.Resource, ID: d.ID}]
		o.ID = cmp.Or(c.PodUID, o.ID)
		record.Holders = append(record.Holders, holders.Holder{Work: o, API: inventory.DevicePlugin, Resource: d.Resource, Unit: unit, Device: device, Memory: c.MemoryLimit})
	}
	for _, c := range r.Answer.Claims {
		if device, ok := c.deviceIn(inv); ok {
			o := owner(c.Pod, c.Container)
			o.Claim = c.Name
			record.Holders = append(record.Holders, holders.Holder{Work: o, API: inventory.DRA, Device: device})
		}
	}
	return record
}

func ownerOf(pod, container string) holders.Work {
	o := holders.Work{Orchestrator: holders.Kubernetes, Container: container}
	o.Namespace, o.Name, _ = strings.Cut(pod, "/")
	return o
}

// nvidiaDriver is the driver of resource claims of NVIDIA and of this project. NVIDIA's names a GPU "gpu-N" by its minor number, that of
// this project by its UUID in lower case, followed by "-sN" for a share that is a device of its own.
const nvidiaDriver = "gpu.nvidia.com"

// deviceIn is the device of a claim: that which the driver names, or else that which a CDI name has as UUID, or as the index by which
// NVIDIA's specifications name devices. The driver's name comes first, because the kubelet lists with each device the CDI names of those
// before it. Other devices, such as a network card or a MIG instance that only NVIDIA's driver numbers, are none.
func (c Claim) deviceIn(inv *inventory.Allocatable) (gpu.DeviceID, bool) {
	if c.Driver == nvidiaDriver {
		for u := range inv.Devices() {
			if c.Names(u.Device) {
				return u.Device.ID, true
			}
		}
	}
	for u := range inv.Devices() {
		d := u.Device
		index := d.CurrentIndex().String()
		for _, name := range c.CDI {
			kind, device, _ := strings.Cut(name, "=")
			if device == string(d.ID) || device == index && strings.HasSuffix(kind, kubeadapter.GPUResource) {
				return d.ID, true
			}
		}
	}
	return "", false
}

// Names reports whether the driver nvidiaDriver, which is that of the claim, names a device as the claim does.
func (c Claim) Names(d gpu.Device) bool {
	if d.Profile == "" && d.Minor >= 0 && c.Device == "gpu-"+strconv.Itoa(d.Minor) {
		return true
	}
	share, ok := strings.CutPrefix(c.Device, strings.ToLower(string(d.ID)))
	if ok && share == "" {
		return true
	}
	number, ok := strings.CutPrefix(share, "-s")
	_, err := strconv.ParseUint(number, 10, 32)
	return ok && err == nil
}
