package cudaproof

import "encoding/binary"

// vectorSize is what a thread writes at once: four words.
const vectorSize = 16

// pattern is what a pass of the memory test writes: words that depend on their place, so that a word at the place of another one is wrong, and in which
// no two passes have the same bits.
type pattern struct{ seed, invert uint32 }

// patterns are the passes: after each its inverse, so that every bit holds 0 and 1.
var patterns = []pattern{{0x243f6a88, 0}, {0x243f6a88, 0xffffffff}, {0xb7e15162, 0}, {0xb7e15162, 0xffffffff}}

// Factors of the pattern: odd, so that each word of 32 bits becomes another one.
const (
	ofLow  = 0x9e3779b1
	ofHigh = 0x85ebca77
	ofWord = 0xc2b2ae35
)

// vector is what the kernel fill writes at a place, counted in vectors: the kernel's arithmetic in Go.
func (p pattern) vector(place uint64) [4]uint32 {
	low, high := uint32(place), uint32(place>>32)
	x := low*ofLow + p.seed
	x = high*ofHigh + x
	return [4]uint32{x ^ p.invert, ^x ^ p.invert, low ^ p.seed ^ p.invert, (x*ofWord ^ high) ^ p.invert}
}

// write writes the pattern from a place on.
func (p pattern) write(to []byte, place uint64) {
	for ; len(to) >= vectorSize; to, place = to[vectorSize:], place+1 {
		for i, word := range p.vector(place) {
			binary.LittleEndian.PutUint32(to[4*i:], word)
		}
	}
}
