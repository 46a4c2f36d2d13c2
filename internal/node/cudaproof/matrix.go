package cudaproof

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math"
	"math/bits"
	"time"
)

// period is after how many rows and columns the values of the matrices repeat: the products have few values, which the node computes in
// milliseconds. It is a power of 2.
const period = 128

// defaultSize is the number of rows and columns: a product takes a GPU of today some milliseconds.
const defaultSize = 4096

// multiplication is a product that the GPU computes again and again. Of each matrix the node has the first rows (of a, columns), which repeat: so the
// proof needs little of its memory.
type multiplication struct {
	kernel  string
	value   string // its name among the values of the result
	n       int
	threads int
	a, b    []byte    // as the kernel reads them
	table   []float32 // period·period values of the product
}

// operand is the value of a matrix at a place: a whole number from -limit to limit. Sums of products are whole numbers below 2^24, so that each is exact
// in FP32, in whatever order they are added.
func operand(row, column int, salt uint32, limit int) int {
	x := uint32(row%period)*ofLow ^ uint32(column%period)*ofHigh ^ salt
	x ^= x >> 15
	x *= ofWord
	x ^= x >> 13
	return int(x%uint32(2*limit+1)) - limit
}

const ofA, ofB = 1, 2 // salts

// limits of the operands: 63·63·4096 is below 2^24. The sums of tensor cores may have fewer bits than those of FP32 arithmetic: NVIDIA documents none.
const productLimit, tensorLimit = 63, 8

// tableOf are the values of a product.
func tableOf(n, limit int) []float32 {
	table := make([]float32, period*period)
	for row := range period {
		for k := range period {
			a := operand(row, k, ofA, limit)
			for column := range period {
				table[row*period+column] += float32(a * operand(k, column, ofB, limit) * (n / period))
			}
		}
	}
	return table
}

// product is the multiplication in FP32.
func product(n int) multiplication {
	store := func(value func(row, column int) int) (text []byte) {
		for row := range period {
			for column := range n {
				text = binary.LittleEndian.AppendUint32(text, math.Float32bits(float32(value(row, column))))
			}
		}
		return text
	}
	return multiplication{
		kernel: productKernel, value: "matrix_tflops", n: n, threads: productThreads, table: tableOf(n, productLimit),
		a: store(func(row, column int) int { return operand(column, row, ofA, productLimit) }), // by columns
		b: store(func(row, column int) int { return operand(row, column, ofB, productLimit) }),
	}
}

// tensor is the multiplication by tensor cores. A fragment of a is a tile of 16·16 values, one of b two tiles of 16·8 side by side; a thread reads four
// pairs of values of it (PTX ISA, mma.m16n8k16).
func tensor(n int) multiplication {
	store := func(value func(outer, inner int) int, pair func(lane, i int) (outer, inner int)) (text []byte) {
		for outer := 0; outer < period; outer += 16 {
			for inner := 0; inner < n; inner += 16 {
				for i := range 32 * 4 {
					o, in := pair(i/4, i%4)
					text = binary.LittleEndian.AppendUint16(text, half(value(outer+o, inner+in)))
					text = binary.LittleEndian.AppendUint16(text, half(value(outer+o, inner+in+1)))
				}
			}
		}
		return text
	}
	return multiplication{
		kernel: tensorKernel, value: "tensor_tflops", n: n, threads: tensorThreads, table: tableOf(n, tensorLimit),
		a: store(func(row, k int) int { return operand(row, k, ofA, tensorLimit) },
			func(lane, i int) (int, int) { return lane/4 + 8*(i%2), lane%4*2 + 8*(i/2) }),
		b: store(func(column, k int) int { return operand(k, column, ofB, tensorLimit) },
			func(lane, i int) (int, int) { return lane/4 + 8*(i/2), lane%4*2 + 8*(i%2) }),
	}
}

// half is a whole number of at most 11 bits in FP16.
func half(v int) uint16 {
	var sign uint16
	if v < 0 {
		sign, v = 0x8000, -v
	}
	if v == 0 {
		return sign
	}
	exponent := bits.Len(uint(v)) - 1
	return sign | uint16(exponent+15)<<10 | uint16(v<<(10-exponent))&0x3ff
}

// operands are buffers of a multiplication.
type operands struct{ a, b, c, table address }

// allocate allocates the buffers, and copies the matrices and the table to them.
func (p *proof) allocate(m multiplication) (at operands, release func(*error), err error) {
	parts := uint64(m.n / period)
	buffers, release, err := p.buffers(parts*uint64(len(m.a)), parts*uint64(len(m.b)), uint64(4*m.n*m.n), uint64(4*len(m.table)))
	if err != nil {
		return operands{}, nil, err
	}
	at = operands{buffers[0], buffers[1], buffers[2], buffers[3]}
	for part := range parts {
		err = cmp.Or(err, p.upload(at.a+address(part*uint64(len(m.a))), m.a), p.upload(at.b+address(part*uint64(len(m.b))), m.b))
	}
	if err = cmp.Or(err, p.upload(at.table, m.rows(period))); err != nil {
		release(&err)
	}
	return at, release, err
}

// rows are the first rows of the product with a number of columns.
func (m multiplication) rows(columns int) (text []byte) {
	for row := range period {
		for column := range columns {
			text = binary.LittleEndian.AppendUint32(text, math.Float32bits(m.table[row*period+column%period]))
		}
	}
	return text
}

// multiply computes a product until the time is over, and compares each with the values that the node computed.
func (p *proof) multiply(m multiplication, atLeast time.Duration) (err error) {
	at, release, err := p.allocate(m)
	if err != nil {
		return err
	}
	defer release(&err)
	count, seconds := 0, 0.0
	for until := p.until(atLeast); count == 0 || time.Now().Before(until); count++ {
		if err := p.going(); err != nil {
			return err
		}
		took, err := p.multiplyOnce(m, at, count+1)
		if err != nil {
			return err
		}
		seconds += took
	}
	if err := p.lastProduct(m, at.c); err != nil {
		return err
	}
	p.measured(m.value, 2*math.Pow(float64(m.n), 3)*float64(count)/1e12, seconds)
	p.reportf("%-9s %d products of %d x %d values are right, %s", m.kernel, count, m.n, m.n, p.shown(m.value, "TFLOPS"))
	return nil
}

// multiplyOnce computes a product and has the GPU compare it. It returns how long the GPU computed.
func (p *proof) multiplyOnce(m multiplication, at operands, number int) (seconds float64, err error) {
	n, blocks := uint64(m.n), m.n/tile
	if err := p.driver.set(at.c, math.MaxUint32, n*n); err != nil { // a NaN, which no product has
		return 0, err
	}
	seconds, err = p.driver.timed(func() error {
		return p.launch(m.kernel, grid{blocks, blocks, m.threads}, uint64(at.a), uint64(at.b), uint64(at.c), n)
	})
	if err != nil {
		return 0, err
	}
	found, err := p.find(func() error {
		return p.launch(compareKernel, p.wide(), uint64(at.c), uint64(at.table), n, uint64(p.findings))
	})
	if err != nil || found.count == 0 {
		return seconds, err
	}
	row, column := int(found.offset/4)/m.n, int(found.offset/4)%m.n
	want := m.table[row%period*period+column%period]
	if !found.real(math.Float32bits(want)) {
		return 0, doubtf("the GPU has found a wrong value in a matrix product, and its note about it is wrong, too")
	}
	return 0, faultf("%d of %d values of matrix product %d (%s) are wrong, the first in row %d, column %d: %v in place of %v",
		found.count, m.n*m.n, number, m.kernel, row, column, math.Float32frombits(uint32(found.there)), want)
}

// lastProduct compares a product on the node, too: the GPU has found no difference.
func (p *proof) lastProduct(m multiplication, c address) error {
	right := m.rows(m.n)
	there := make([]byte, len(right))
	for part := range m.n / period {
		if err := p.driver.read(there, c+address(part*len(there))); err != nil {
			return err
		}
		if !bytes.Equal(there, right) {
			return doubtf("a matrix product (%s) is right on the GPU, and its copy on the node is wrong", m.kernel)
		}
	}
	return nil
}
