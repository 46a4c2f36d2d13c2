package inventory

import "github.com/tandem-gpu/tandem/internal/core/gpu"

// connection is how well two GPUs are connected, or the sum of that over several pairs. A larger value is better. It
// has three parts, of which a later one decides only if the earlier ones are equal:
//
//  1. the bandwidth in points, of which 100 are 25 GB/s in each direction: those of the NVLinks, and 10 to 60 for the
//     PCIe path (10 per value of gpu.PCIePath);
//  2. pairs whose NVLinks go through NVSwitches, where one GPU can use all its links for any other;
//  3. pairs on one NUMA node.
//
// Where links have 25 GB/s and no NVSwitches, the points are the score of NVIDIA's go-gpuallocator.
type connection int64

// The units of the three parts. With 16 bits for each of the latter two, sums are exact for 65,535 pairs. A measure.degree has each
// pair within its set twice, so that is enough for 256 GPUs.
const (
	point    connection = 1 << 32
	switched connection = 1 << 16
	sameNode connection = 1
)

// connectionOf returns the connection of a link, without the NUMA nodes.
func connectionOf(l gpu.Link) connection {
	c := connection(10*int(l.Path)+nvlinkPoints(l.Generation)*l.NVLinks) * point
	if l.NVSwitch {
		c += switched
	}
	return c
}

// nvlinkPoints are the points of one NVLink: 20 GB/s in each direction in generation 1, 50 GB/s from generation 5 on,
// 25 GB/s in between and where the generation is unknown.
func nvlinkPoints(g gpu.NVLinkGeneration) int {
	switch {
	case g == 1:
		return 80
	case g >= 5:
		return 200
	default:
		return 100
	}
}

// connections are those of all pairs of some GPUs: a symmetric matrix, zero on the diagonal.
type connections [][]connection

// connectionsOf returns the connections of GPUs, by their numbers. Links with other GPUs do not count.
func connectionsOf(links []gpu.Link, number map[gpu.DeviceID]int, numaNodes []int) connections {
	n := len(numaNodes)
	all, rows := make([]connection, n*n), make(connections, n)
	for a := range rows {
		rows[a] = all[a*n : (a+1)*n]
		for b, node := range numaNodes {
			if a != b && node >= 0 && node == numaNodes[a] {
				rows[a][b] = sameNode
			}
		}
	}
	for _, l := range links {
		a, known := number[l.A]
		b, too := number[l.B]
		if known && too && a != b {
			c := rows[a][b]%switched + connectionOf(l) // a pair that is listed twice counts once
			rows[a][b], rows[b][a] = c, c
		}
	}
	return rows
}
