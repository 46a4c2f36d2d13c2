package record

import (
	"fmt"
	"slices"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

var levels = map[nvml.GpuTopologyLevel]string{
	nvml.TOPOLOGY_INTERNAL: "internal", nvml.TOPOLOGY_SINGLE: "single", nvml.TOPOLOGY_MULTIPLE: "multiple",
	nvml.TOPOLOGY_HOSTBRIDGE: "hostbridge", nvml.TOPOLOGY_NODE: "node", nvml.TOPOLOGY_SYSTEM: "system",
}

// nvlinks are the NVLinks of one GPU.
type nvlinks struct {
	active   int
	toSwitch int
	down     uint64         // bit mask
	to       map[string]int // links to each PCI address
	switches []string       // PCI addresses of the switches, in the order of the links
}

// readLinks reads how the GPUs are connected: the lines of the section links.
func (m *machine) readLinks() (lines []string) {
	all := make([]nvlinks, len(m.gpus))
	most := 0
	var switches []string
	for i := range m.gpus {
		all[i] = m.readNVLinks(i)
		most = max(most, all[i].toSwitch)
		for _, s := range all[i].switches {
			if !slices.Contains(switches, s) {
				switches = append(switches, s)
			}
		}
	}
	n := len(m.gpus)
	if len(switches) > 0 {
		lines = append(lines, "switches = "+strings.Join(switches, " "))
	}
	if m.has("nvmlDeviceGetTopologyCommonAncestor") && n > 1 {
		lines = append(lines, pairLines("topology", n, m.topology)...)
	}
	switch {
	case most > 0 && n == 1:
		lines = append(lines, fmt.Sprintf("# %d NVLinks to switches: a machine file has NVLinks of pairs of GPUs only", most))
	case most > 0:
		lines = append(lines, fmt.Sprintf("nvlink = %d all", most))
	case n > 1:
		lines = append(lines, pairLines("nvlink", n, func(i, j int) string {
			if links := all[i].to[m.gpus[j].Values["pci"]]; links > 0 {
				return fmt.Sprint(links)
			}
			return ""
		})...)
	}
	return lines
}

// topology is the level of a pair; "" if the driver does not report it.
func (m *machine) topology(i, j int) string {
	level, ret := m.handles[i].GetTopologyCommonAncestor(m.handles[j])
	m.note(m.gpus[i].Index, "topology", fmt.Sprintf("nvmlDeviceGetTopologyCommonAncestor(%d)", m.gpus[j].Index), levels[level], ret)
	if ret != nvml.SUCCESS {
		return ""
	}
	return levels[level]
}

// readNVLinks reads the state and the remote end of each NVLink.
func (m *machine) readNVLinks(i int) nvlinks {
	l := nvlinks{to: map[string]int{}}
	if !m.has("nvmlDeviceGetNvLinkState") {
		return l
	}
	h, g := m.handles[i], &m.gpus[i]
	for link := range nvml.NVLINK_MAX_LINKS {
		state, ret := h.GetNvLinkState(link)
		if link == 0 {
			m.note(g.Index, "nvlink", "nvmlDeviceGetNvLinkState(0)", decimal(state), ret)
		}
		switch {
		case ret == nvml.ERROR_NOT_SUPPORTED || ret == nvml.ERROR_INVALID_ARGUMENT:
			continue
		case ret != nvml.SUCCESS || state != nvml.FEATURE_ENABLED:
			l.down |= 1 << link
			continue
		}
		l.active++
		m.countEnd(h, link, &l)
	}
	if l.active > 0 && l.down != 0 {
		g.Values["links_down"] = hexadecimal(l.down)
	}
	if l.active == 0 { // what is known of links is about none
		delete(g.Values, "nvlink_version")
		delete(g.Values, "nvlink_speed")
	}
	return l
}

// countEnd reads the remote end of an active link.
func (m *machine) countEnd(h nvml.Device, link int, l *nvlinks) {
	remote := ""
	if m.has("nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetNvLinkRemotePciInfo") {
		if info, ret := h.GetNvLinkRemotePciInfo(link); ret == nvml.SUCCESS {
			remote = address(info)
		}
	}
	if m.has("nvmlDeviceGetNvLinkRemoteDeviceType") {
		kind, ret := h.GetNvLinkRemoteDeviceType(link)
		if ret == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
			l.toSwitch++
			if remote == "" {
				remote = "outside"
			}
			l.switches = append(l.switches, remote)
			return
		}
	}
	if remote != "" {
		l.to[remote]++
	}
}

// pairLines writes a value of each pair of n GPUs: the most frequent one for all, then each other one, as later lines win. "" is no
// value.
func pairLines(key string, n int, value func(i, j int) string) (lines []string) {
	of := map[[2]int]string{}
	count := map[string]int{}
	for i := range n {
		for j := i + 1; j < n; j++ {
			v := value(i, j)
			of[[2]int{i, j}] = v
			count[v]++
		}
	}
	usual := ""
	for _, v := range sortedKeys(count) {
		if count[v] > count[usual] || usual == "" {
			usual = v
		}
	}
	if key == "nvlink" && count[""] > 0 {
		usual = "" // pairs without NVLinks have no line
	}
	if usual != "" {
		lines = append(lines, fmt.Sprintf("%s = %s all", key, usual))
	}
	for i := range n {
		for j := i + 1; j < n; j++ {
			if v := of[[2]int{i, j}]; v != usual && v != "" {
				lines = append(lines, fmt.Sprintf("%s = %s %d %d", key, v, i, j))
			}
		}
	}
	return lines
}
