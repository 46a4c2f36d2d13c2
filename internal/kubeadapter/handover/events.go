package handover

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/faultreport"
	"github.com/tandem-gpu/tandem/internal/core/holders"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// reporter is the program in events. The admission policy of deploy/hand-over names it, too.
const reporter = "tandem.dev/k8s-gpu"

// notify creates an event for each pod on each fault that needs a repair, unless this process has done so. The name of the event is that of fault
// and pod: another process that reports the same finds it there.
func (h *Handover) notify(ctx context.Context, faults []faultreport.Fault, r holders.Record) error {
	now, told := time.Now(), map[string]bool{}
	var failed error
	for _, f := range faults {
		if !NeedsRepair(f) {
			continue
		}
		for _, pod := range podsOn(f.Placement(), r) {
			e := eventOf(f, pod, h.opts.Node, now)
			key := e.Metadata.Namespace + "/" + e.Metadata.Name
			if pod.Name == "" || pod.ID == "" {
				continue
			}
			if !h.told[key] && failed == nil {
				if err := h.opts.API.CreateEvent(ctx, e); err != nil && !errors.Is(err, kubeapi.ErrExists) {
					failed = err
					continue
				}
				h.told[key] = true
			}
			told[key] = h.told[key]
		}
	}
	h.told = told // without those of faults and pods that are gone
	return failed
}

// eventOf is the event of a pod that has hardware with a fault.
func eventOf(f faultreport.Fault, pod holders.Work, node string, now time.Time) kubeapi.PodEvent {
	id := sha256.Sum256(fmt.Appendf(nil, "%s %s %d %s", f.Placement(), f.Cause, f.Since.UnixNano(), pod.ID))
	note := fmt.Sprintf("The pod has a GPU of node %s that needs a repair: %s, since %s. The GPU gets no new work.",
		node, described(f), f.Since.UTC().Format("2006-01-02T15:04Z"))
	return kubeapi.PodEvent{
		Metadata:  kubeapi.ObjectMeta{Namespace: pod.Namespace, Name: "tandem-gpu-" + hex.EncodeToString(id[:10])},
		EventTime: kubeapi.MicroTime{Time: now}, ReportingController: reporter, ReportingInstance: node[:min(len(node), kubeapi.MaxEventInstance)],
		Action: "ReportFault", Reason: reasonFault, Type: "Warning", Note: note[:min(len(note), kubeapi.MaxEventNote)],
		Regarding: kubeapi.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.ID},
	}
}
