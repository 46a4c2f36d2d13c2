package golden

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// lists are the device lists that the kubelet has, by resource.
func (h *host) lists() string {
	var out strings.Builder
	for _, resource := range h.resources() {
		devices, connected := h.kubelet.Devices(resource)
		fmt.Fprintf(&out, "%s: %d devices, connected: %t\n", resource, len(devices), connected)
		for _, d := range devices {
			fmt.Fprintf(&out, "  %s %s", d.GetID(), d.GetHealth())
			for _, n := range d.GetTopology().GetNodes() {
				fmt.Fprintf(&out, " NUMA node %d", n.GetID())
			}
			fmt.Fprintln(&out)
		}
	}
	return out.String()
}

func (h *host) resources() (names []string) {
	for _, r := range h.kubelet.Registrations() {
		names = append(names, r.Resource)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// kubeletPage is what the kubelet gets.
func (h *host) kubeletPage() string {
	var out strings.Builder
	var registrations []string
	for _, r := range h.kubelet.Registrations() {
		registrations = append(registrations, fmt.Sprintf("Register %s %s", r.Resource, r.Endpoint))
	}
	fmt.Fprint(&out, counted(registrations), h.lists())
	for _, resource := range h.resources() {
		client, err := h.kubelet.Plugin(resource)
		must(h.t, err)
		options, err := client.GetDevicePluginOptions(h.t.Context(), &v1beta1.Empty{})
		must(h.t, err)
		fmt.Fprintf(&out, "%s: PreStartRequired %t, GetPreferredAllocationAvailable %t\n", resource, options.GetPreStartRequired(), options.GetGetPreferredAllocationAvailable())
		devices, _ := h.kubelet.Devices(resource)
		ids := make([]string, len(devices))
		for i, d := range devices {
			ids[i] = d.GetID()
		}
		for _, asked := range slices.CompactFunc([][]string{ids[:1], ids, {"GPU-0"}}, slices.Equal) {
			r, err := h.kubelet.Allocate(h.t.Context(), resource, asked...)
			fmt.Fprintf(&out, "Allocate %s %s\n", strings.Join(asked, " "), refusal(err))
			for _, key := range slices.Sorted(maps.Keys(r.GetEnvs())) {
				fmt.Fprintf(&out, "  env %s=%s\n", key, r.GetEnvs()[key])
			}
			for _, m := range r.GetMounts() {
				fmt.Fprintf(&out, "  mount %s %s read-only %t\n", m.GetHostPath(), m.GetContainerPath(), m.GetReadOnly())
			}
			for _, d := range r.GetDevices() {
				fmt.Fprintf(&out, "  device %s %s %s\n", d.GetHostPath(), d.GetContainerPath(), d.GetPermissions())
			}
			fmt.Fprintf(&out, "  annotations %v, CDI %v\n", r.GetAnnotations(), r.GetCdiDevices())
		}
		for _, n := range slices.Compact([]int{1, min(2, len(ids)), min(len(ids)/2+1, len(ids))}) {
			chosen, err := h.kubelet.Prefer(h.t.Context(), resource, ids, nil, n)
			fmt.Fprintf(&out, "GetPreferredAllocation %d %s\n  %s\n", n, refusal(err), strings.Join(chosen, " "))
		}
	}
	return masked(h.dir, out.String())
}

func refusal(err error) string {
	if err == nil {
		return ""
	}
	return fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message())
}

// fingerprint is the latest.
func (p *process) fingerprint() string {
	var lines []string
	for _, g := range p.nomad.Groups() {
		text := fmt.Sprintf("group %s/%s/%s\n", g.Vendor, g.Type, g.Name)
		for _, key := range slices.Sorted(maps.Keys(g.Attributes)) {
			text += fmt.Sprintf("  attribute %s = %s\n", key, strings.TrimSpace(g.Attributes[key].GoString()))
		}
		for _, d := range g.Devices {
			text += fmt.Sprintf("  device %s healthy %t %q PCI %s\n", d.ID, d.Healthy, d.HealthDesc, d.HwLocality.PciBusID)
		}
		lines = append(lines, text)
	}
	slices.Sort(lines)
	return masked(p.h.dir, strings.Join(lines, ""))
}

// nomadPage is what Nomad gets.
func (p *process) nomadPage() string {
	var out strings.Builder
	info, err := p.PluginInfo()
	must(p.h.t, err)
	fmt.Fprintf(&out, "PluginInfo %s %s %s %v\n%s", info.Type, info.Name, info.PluginVersion, info.PluginApiVersions, p.fingerprint())
	groups := slices.SortedFunc(slices.Values(p.nomad.Groups()), func(a, b *device.DeviceGroup) int { return strings.Compare(a.Type+a.Name, b.Type+b.Name) })
	requests := [][]string{{"GPU-0"}}
	for _, g := range groups {
		var ids []string
		for _, d := range g.Devices {
			ids = append(ids, d.ID)
		}
		requests = append(requests, ids[:1], ids)
	}
	for _, ids := range requests {
		r, err := p.Reserve(ids)
		fmt.Fprintf(&out, "Reserve %s %s\n", strings.Join(ids, " "), refusal(err))
		if err != nil {
			continue
		}
		for _, key := range slices.Sorted(maps.Keys(r.Envs)) {
			fmt.Fprintf(&out, "  env %s=%s\n", key, r.Envs[key])
		}
		for _, m := range r.Mounts {
			fmt.Fprintf(&out, "  mount %s %s read-only %t\n", m.HostPath, m.TaskPath, m.ReadOnly)
		}
		for _, d := range r.Devices {
			fmt.Fprintf(&out, "  device %s %s %s\n", d.HostPath, d.TaskPath, d.CgroupPerms)
		}
	}
	if len(groups) > 0 {
		fmt.Fprint(&out, p.stats())
	}
	return masked(p.h.dir, out.String())
}

// stats has a line for each name, of all devices of a group.
func (p *process) stats() string {
	ctx, cancel := context.WithTimeout(p.h.t.Context(), timeout)
	defer cancel()
	stream, err := p.Stats(ctx, timeout)
	must(p.h.t, err)
	r := <-stream
	must(p.h.t, r.Error)
	var lines []string
	for _, g := range r.Groups {
		for _, s := range g.InstanceStats {
			group := "Stats " + g.Type + "/" + g.Name
			lines = append(lines, group+": summary: "+statText("", s.Summary))
			lines = append(lines, statLines(group+": ", s.Stats)...)
		}
	}
	return counted(lines)
}

func statLines(prefix string, o *structs.StatObject) (lines []string) {
	if o == nil {
		return nil
	}
	for name, v := range o.Attributes {
		lines = append(lines, prefix+statText(name, v))
	}
	for name, nested := range o.Nested {
		lines = append(lines, statLines(prefix+name+"/", nested)...)
	}
	return lines
}

var statValues = regexp.MustCompile(`Val":[0-9.e+-]+`)

// statText is a value as JSON, without the number.
func statText(name string, v *structs.StatValue) string {
	text, _ := json.Marshal(v) // of numbers and strings
	return name + " " + statValues.ReplaceAllString(string(text), `Val":N`)
}
