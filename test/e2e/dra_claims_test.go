//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// readClaim returns a claim.
func readClaim(namespace, name string) (c kubeapi.ResourceClaim, err error) {
	err = fetchJSON(kubeAPI+"/apis/resource.k8s.io/v1/namespaces/"+namespace+"/resourceclaims/"+name, &c)
	return c, err
}

// podClaim is a claim of a pod: under this name in its containers, with this name in the API, which in the specification of a pod with a
// template is "".
type podClaim struct{ Name, ResourceClaimName string }

// claims returns the claims of a pod. The one that the scheduler made for its extended resources has no name in the pod.
func (p pod) claims() []podClaim {
	all := slices.DeleteFunc(slices.Clone(p.Spec.ResourceClaims), func(c podClaim) bool { return c.ResourceClaimName == "" })
	for _, c := range p.Status.ResourceClaimStatuses {
		if !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	if name := p.Status.ExtendedResourceClaimStatus.ResourceClaimName; name != "" {
		all = append(all, podClaim{ResourceClaimName: name})
	}
	return all
}

// allocated returns what the claims of a pod have, by the claim's name in the pod. An error is a claim that is not allocated.
func (p pod) allocated() (map[string][]kubeapi.DeviceRequestAllocationResult, error) {
	results := map[string][]kubeapi.DeviceRequestAllocationResult{}
	if len(p.claims()) < max(1, len(p.Spec.ResourceClaims)) {
		return nil, fmt.Errorf("pod %s has the claims %v", p.Metadata.Name, p.claims())
	}
	for _, of := range p.claims() {
		claim, err := readClaim(p.Metadata.Namespace, of.ResourceClaimName)
		if err == nil && claim.Status.Allocation == nil {
			err = errors.New(of.ResourceClaimName + " is not allocated")
		}
		if err != nil {
			return nil, err
		}
		results[of.Name] = claim.Status.Allocation.Devices.Results
	}
	return results, nil
}

// devicesOfContainers returns the names of the devices that each container should get: those of the claims, or of the requests, that it names.
func (p pod) devicesOfContainers() (map[string][]string, error) {
	results, err := p.allocated()
	if err != nil {
		return nil, err
	}
	devices := map[string][]string{}
	add := func(container, claim, request string) {
		for _, r := range results[claim] {
			of, _, _ := strings.Cut(r.Request, "/") // "request/subrequest"
			if request == "" || request == of {
				devices[container] = append(devices[container], r.Device)
			}
		}
	}
	for _, container := range p.Spec.Containers {
		for _, c := range container.Resources.Claims {
			add(container.Name, c.Name, c.Request)
		}
	}
	for _, m := range p.Status.ExtendedResourceClaimStatus.RequestMappings {
		add(m.ContainerName, "", m.RequestName)
	}
	return devices, nil
}

// awaitAllocated waits until all claims of the pod are allocated, and returns their results.
func (c *cluster) awaitAllocated(t *testing.T, name string) (all []kubeapi.DeviceRequestAllocationResult) {
	t.Helper()
	await(t, "the claims of pod "+name, 30*time.Second, func() error {
		p, err := c.pod(name)
		if err != nil {
			return err
		}
		results, err := p.allocated()
		all = nil
		for _, r := range results {
			all = append(all, r...)
		}
		return err
	})
	return all
}

// awaitEvent waits for an event of the pod with this reason whose text contains the wanted one, and returns the text.
func (c *cluster) awaitEvent(t *testing.T, name, reason, text string) (message string) {
	t.Helper()
	await(t, fmt.Sprintf("an event %s of pod %s with %q", reason, name, text), 60*time.Second, func() error {
		var list struct {
			Items []struct{ Reason, Message string }
		}
		err := c.get("/api/v1/namespaces/default/events?fieldSelector=involvedObject.name="+name, &list)
		for _, e := range list.Items {
			if message = e.Message; e.Reason == reason && strings.Contains(message, text) {
				return nil
			}
		}
		return errors.Join(fmt.Errorf("they are %+v", list.Items), err)
	})
	t.Logf("event of pod %s: %s: %s", name, reason, message)
	return message
}
