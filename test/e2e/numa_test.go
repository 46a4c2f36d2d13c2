//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"testing"
)

// systemNodes is where kubelet finds the NUMA nodes of a machine.
const systemNodes = "/sys/devices/system/node"

// alignment has kubelet give a container CPUs and devices of one NUMA node. Of half a CPU that is reserved it makes a whole one, CPU 0.
const alignment = `
topologyManagerPolicy: single-numa-node
cpuManagerPolicy: static
kubeReserved: {cpu: 500m}
`

// numaOfCPU is the NUMA node that simulateNUMA puts a CPU on: even and odd numbers.
func numaOfCPU(cpu int64) int64 { return cpu % 2 }

// simulateNUMA gives the node the two NUMA nodes that the simulated machine has, in place of those of the real one.
func (n *kubeNode) simulateNUMA(t *testing.T) {
	t.Helper()
	dir := filepath.Join(n.dir, "numa")
	var err error
	for numa := range int64(2) {
		node := filepath.Join(dir, fmt.Sprintf("node%d", numa))
		distance := []string{"10 21\n", "21 10\n"}[numa]
		err = errors.Join(err, os.MkdirAll(filepath.Join(node, "hugepages"), 0o755),
			os.WriteFile(filepath.Join(node, "distance"), []byte(distance), 0o644))
		for cpu := range int64(goruntime.NumCPU()) {
			if numaOfCPU(cpu) == numa {
				name := fmt.Sprintf("cpu%d", cpu)
				err = errors.Join(err, os.Symlink("/sys/devices/system/cpu/"+name, filepath.Join(node, name)))
			}
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	must(t, slices.Concat(n.enter, []string{"mount", "--bind", filepath.Join(stateDir(), "numa"), systemNodes})...)
}
