// Package nodelabels writes labels of a node for Node Feature Discovery (NFD), as a file for NFD's worker or as an object for its master: the
// names and values of NVIDIA's gpu-feature-discovery, from the state of the agent, so that the separate program is not needed.
//
// Source of names and values: internal/lm of github.com/NVIDIA/k8s-device-plugin v0.19.0. test/conformance/labels compares with
// that program.
package nodelabels

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Labels are the labels of a node by name: "nvidia.com/gpu.count".
type Labels map[string]string

const (
	prefix         = inventory.ResourceDomain
	timestampLabel = prefix + "gfd.timestamp"
)

// Of returns the labels of a node under a MIG strategy; none without devices. They describe the hardware, as those of NVIDIA's program
// do: GPUs that are unhealthy, lost or not offered count. Sharing is that of the inventory.
func Of(s core.State, strategy inventory.MIGStrategy, h Host) Labels {
	devices := s.Snapshot.Devices
	if len(devices) == 0 {
		return nil
	}
	l := Labels{prefix + "gpu.machine": sanitised(h.Machine), prefix + "gpu.mode": h.mode()}
	l.addVersions(s.Snapshot.Driver)
	l.addVGPU(h.withVGPU(s))
	l[prefix+"mig.capable"] = strconv.FormatBool(slices.ContainsFunc(devices, func(d gpu.Device) bool { return d.CanMIG }))
	if clique := cliqueOf(s); clique != "" {
		l[prefix+"gpu.clique"] = clique
	}
	n := newNode(s, strategy)
	l[prefix+"mps.capable"] = strconv.FormatBool(n.sharesByMPS())
	n.addGPUs(l)
	switch n.strategy {
	case inventory.MIGNone:
	case inventory.MIGSingle:
		n.addSingle(l)
	case inventory.MIGMixed:
		n.addMixed(l)
	}
	if n.strategy != inventory.MIGNone {
		l[prefix+"mig.strategy"] = string(n.strategy)
	}
	return l
}

// addVersions adds those of the driver. A version in another format than NVIDIA's has none.
func (l Labels) addVersions(d gpu.Driver) {
	parts := strings.Split(d.Version, ".")
	if len(parts) == 2 || len(parts) == 3 {
		parts = append(parts, "")
		l.addTwice("cuda.driver", "major", "major", parts[0])
		l.addTwice("cuda.driver", "minor", "minor", parts[1])
		l.addTwice("cuda.driver", "rev", "revision", parts[2])
		l[prefix+"cuda.driver-version.full"] = d.Version
	}
	if major, minor, ok := strings.Cut(d.CUDA, "."); ok {
		l.addTwice("cuda.runtime", "major", "major", major)
		l.addTwice("cuda.runtime", "minor", "minor", minor)
		l[prefix+"cuda.runtime-version.full"] = d.CUDA
	}
}

// addTwice adds a label under its former name, which NVIDIA's program still writes, and its present one.
func (l Labels) addTwice(name, former, present, value string) {
	l[prefix+name+"."+former], l[prefix+name+"-version."+present] = value, value
}

// addVGPU adds whether the GPUs are those of a virtual machine, and the driver of its host. Nothing is added if that can't be read.
func (l Labels) addVGPU(h Host) {
	if !h.VGPUKnown {
		return
	}
	l[prefix+"vgpu.present"] = strconv.FormatBool(h.VGPU)
	if h.VGPU && h.HostDriver != "" {
		l[prefix+"vgpu.host-driver-version"], l[prefix+"vgpu.host-driver-branch"] = h.HostDriver, h.HostBranch
	}
}

// cliqueOf returns the clique of all GPUs that have one; "" if they differ.
func cliqueOf(s core.State) (clique string) {
	for _, d := range s.Snapshot.Devices {
		history, _ := s.Ledger.History(d.ID)
		switch own := history.Sample.Clique; {
		case own == "" || own == clique:
		case clique == "":
			clique = own
		default:
			return ""
		}
	}
	return clique
}

// sanitised returns a name in the characters of a label.
func sanitised(name string) string {
	kept := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', strings.ContainsRune("-_. ", r):
			return r
		}
		return -1
	}, name)
	return strings.Join(strings.Fields(kept), "-")
}

// at returns the labels with the time of a change.
func (l Labels) at(changed time.Time) Labels {
	all := maps.Clone(l)
	all[timestampLabel] = strconv.FormatInt(changed.Unix(), 10)
	return all
}

// Text returns the content of a features file: one label a line, sorted.
func (l Labels) Text() []byte {
	var text bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(l)) {
		text.WriteString(name + "=" + l[name] + "\n")
	}
	return text.Bytes()
}

// areLabels reports whether a file has labels of this agent or NVIDIA's program, and nothing else.
func areLabels(text []byte) bool {
	for line := range strings.Lines(string(text)) {
		if name, _, ok := strings.Cut(line, "="); !ok || !strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return true
}

// parse returns the labels of a features file without the time of the change, and whether the file has that.
func parse(text []byte) (l Labels, timestamp bool) {
	l = Labels{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
		l[name] = value
	}
	_, timestamp = l[timestampLabel]
	delete(l, timestampLabel)
	return l, timestamp
}
