package cudaproof

import (
	"fmt"
	"strings"
)

// The kernels are PTX, which the driver compiles for its GPU: a text for an old target is valid for every newer one. Every parameter has 64 bits.
// The tests run these texts in an interpreter.

// Kernels of a program.
const (
	fillKernel    = "fill"    // memory, vectors, first, seed, invert: writes a pattern
	checkKernel   = "check"   // the same and findings: compares memory with the pattern
	productKernel = "product" // a, b, c, n: c = a·b in FP32, each n·n; a is stored by columns
	tensorKernel  = "tensor"  // a, b, c, n: the same by tensor cores, FP16 with sums in FP32; a and b are stored as fragments
	compareKernel = "compare" // c, table, n, findings: compares a product with the table of its values
)

// How the kernels of products divide their work: a block computes tile·tile values.
const (
	tile           = 128
	productThreads = 256
	tensorThreads  = 128
)

// hasTensor reports whether a GPU has the instruction of the kernel tensor.
func (g device) hasTensor() bool { return g.major >= 8 }

// program is the text for a GPU. Drivers for CUDA 13 have no GPU before Turing, and may not compile for these; before it, all GPUs of
// drivers for CUDA 12 have sm_50.
func program(g device) string {
	head := ".version 5.0\n.target sm_50\n"
	switch {
	case g.hasTensor():
		head = ".version 7.0\n.target sm_80\n"
	case 10*g.major+g.minor >= 75:
		head = ".version 6.3\n.target sm_75\n"
	}
	text := head + ".address_size 64\n" + fillText() + checkText() + productText() + compareText()
	if g.hasTensor() {
		text += tensorText()
	}
	return text
}

// kernel is a text that is being written.
type kernel struct{ strings.Builder }

func (k *kernel) line(format string, args ...any) { fmt.Fprintf(k, format+"\n", args...) }

// newKernel begins a kernel. Its parameters are in registers of their names.
func newKernel(name string, params ...string) *kernel {
	k := &kernel{}
	declared := make([]string, len(params))
	for i, p := range params {
		declared[i] = ".param .u64 " + name + "_" + p
	}
	k.line(".visible .entry %s(%s)\n{", name, strings.Join(declared, ", "))
	k.line(".reg .pred %%p<2>;\n.reg .b32 %%r<64>;\n.reg .b64 %%d<16>;\n.reg .f32 %%f<128>;")
	for _, p := range params {
		k.line(".reg .b64 %%%s;\nld.param.u64 %%%[1]s, [%s_%[1]s];", p, name)
	}
	return k
}

// global makes the parameters addresses of the GPU's memory.
func (k *kernel) global(params ...string) {
	for _, p := range params {
		k.line("cvta.to.global.u64 %%%s, %%%[1]s;", p)
	}
}

func (k *kernel) end() string {
	k.line("ret;\n}")
	return k.String()
}

// index writes the number of the thread in its grid into r0, and the number of threads into r1.
func (k *kernel) index() {
	k.line(`mov.u32 %%r0, %%ctaid.x;
mov.u32 %%r1, %%ntid.x;
mov.u32 %%r2, %%tid.x;
mov.u32 %%r3, %%nctaid.x;
mad.lo.u32 %%r0, %%r0, %%r1, %%r2;
mul.lo.u32 %%r1, %%r1, %%r3;`)
}

// find compares two words, counts a difference, and notes the first: its byte (offset and a number), what is right, and what is there.
func (k *kernel) find(label, right, there, offset string, add int) {
	k.line(`setp.eq.u32 %%p1, %[2]s, %[3]s;
@%%p1 bra %[1]s;
atom.global.add.u64 %%d4, [%%findings], 1;
setp.ne.u64 %%p1, %%d4, 0;
@%%p1 bra %[1]s;
add.u64 %%d5, %[4]s, %[5]d;
st.global.u64 [%%findings+8], %%d5;
cvt.u64.u32 %%d5, %[2]s;
st.global.u64 [%%findings+16], %%d5;
cvt.u64.u32 %%d5, %[3]s;
st.global.u64 [%%findings+24], %%d5;
%[1]s:`, label, right, there, offset, add)
}

func fillText() string {
	k := newKernel(fillKernel, "memory", "vectors", "first", "seed", "invert")
	k.global("memory")
	k.forVectors(func() { k.line("st.global.v4.u32 [%%d3], {%%r8, %%r9, %%r10, %%r11};") })
	return k.end()
}

func checkText() string {
	k := newKernel(checkKernel, "memory", "vectors", "first", "seed", "invert", "findings")
	k.global("memory", "findings")
	k.forVectors(func() {
		k.line("ld.global.v4.u32 {%%r12, %%r13, %%r14, %%r15}, [%%d3];\nshl.b64 %%d6, %%d2, 4;")
		for i := range 4 {
			k.find(fmt.Sprint("right", i), fmt.Sprint("%r", 8+i), fmt.Sprint("%r", 12+i), "%d6", 4*i)
		}
	})
	return k.end()
}

// forVectors writes a loop over the vectors of a thread: d2 is the place in the pattern, d3 the address, r8 to r11 the words.
func (k *kernel) forVectors(do func()) {
	k.index()
	k.line(`cvt.u64.u32 %%d0, %%r0;
cvt.u64.u32 %%d1, %%r1;
cvt.u32.u64 %%r4, %%seed;
cvt.u32.u64 %%r5, %%invert;
next:
setp.ge.u64 %%p0, %%d0, %%vectors;
@%%p0 bra done;
add.u64 %%d2, %%first, %%d0;
shl.b64 %%d3, %%d0, 4;
add.u64 %%d3, %%memory, %%d3;
mov.b64 {%%r6, %%r7}, %%d2;
mad.lo.u32 %%r8, %%r6, %#x, %%r4;
mad.lo.u32 %%r8, %%r7, %#x, %%r8;
mul.lo.u32 %%r11, %%r8, %#x;
xor.b32 %%r11, %%r11, %%r7;
xor.b32 %%r10, %%r6, %%r4;
not.b32 %%r9, %%r8;`, uint32(ofLow), uint32(ofHigh), uint32(ofWord))
	for w := 8; w < 12; w++ {
		k.line("xor.b32 %%r%d, %%r%[1]d, %%r5;", w)
	}
	do()
	k.line("add.u64 %%d0, %%d0, %%d1;\nbra next;\ndone:")
}

func compareText() string {
	k := newKernel(compareKernel, "c", "table", "n", "findings")
	k.global("c", "table", "findings")
	k.index()
	k.line(`cvt.u32.u64 %%r4, %%n;
mul.lo.u32 %%r5, %%r4, %%r4;
next:
setp.ge.u32 %%p0, %%r0, %%r5;
@%%p0 bra done;
div.u32 %%r6, %%r0, %%r4;
rem.u32 %%r7, %%r0, %%r4;
and.b32 %%r6, %%r6, %[1]d;
and.b32 %%r7, %%r7, %[1]d;
mad.lo.u32 %%r6, %%r6, %[2]d, %%r7;
mul.wide.u32 %%d0, %%r6, 4;
add.u64 %%d0, %%table, %%d0;
ld.global.u32 %%r8, [%%d0];
mul.wide.u32 %%d1, %%r0, 4;
add.u64 %%d0, %%c, %%d1;
ld.global.u32 %%r9, [%%d0];`, period-1, period)
	k.find("right", "%r8", "%r9", "%d1", 0)
	k.line("add.u32 %%r0, %%r0, %%r1;\nbra next;\ndone:")
	return k.end()
}

// productText is a product whose blocks take 8 rows of a and b at a time into shared memory, and whose threads compute 8·8 values of them: rows
// and columns 0 to 3 and 64 to 67 from a place of their own.
func productText() string {
	k := newKernel(productKernel, "a", "b", "c", "n")
	k.line(".shared .align 16 .b8 tiles[8192];")
	k.global("a", "b", "c")
	k.line(`mov.u32 %%r0, %%tid.x;
mov.u32 %%r3, %%ctaid.x;
mov.u32 %%r4, %%ctaid.y;
cvt.u32.u64 %%r5, %%n;
shl.b32 %%r3, %%r3, 7;
shl.b32 %%r4, %%r4, 7;
shr.u32 %%r1, %%r0, 5;
and.b32 %%r2, %%r0, 31;
shl.b32 %%r2, %%r2, 2;
mad.lo.u32 %%r6, %%r1, %%r5, %%r2;
add.u32 %%r7, %%r6, %%r4;
mul.wide.u32 %%d0, %%r7, 4;
add.u64 %%d0, %%a, %%d0;
add.u32 %%r7, %%r6, %%r3;
mul.wide.u32 %%d1, %%r7, 4;
add.u64 %%d1, %%b, %%d1;
mul.wide.u32 %%d2, %%r5, 32;
mov.u32 %%r8, tiles;
shl.b32 %%r9, %%r0, 4;
add.u32 %%r9, %%r8, %%r9;
shr.u32 %%r13, %%r0, 4;
and.b32 %%r14, %%r0, 15;
mad.lo.u32 %%r10, %%r13, 16, %%r8;
mad.lo.u32 %%r11, %%r14, 16, %%r8;
mov.u32 %%r12, 0;`)
	k.zero(64)
	k.line(`next:
ld.global.v4.f32 {%%f64, %%f65, %%f66, %%f67}, [%%d0];
ld.global.v4.f32 {%%f68, %%f69, %%f70, %%f71}, [%%d1];
bar.sync 0;
st.shared.v4.f32 [%%r9], {%%f64, %%f65, %%f66, %%f67};
st.shared.v4.f32 [%%r9+4096], {%%f68, %%f69, %%f70, %%f71};
bar.sync 0;`)
	for row := range 8 {
		for i, at := range []struct {
			register string
			offset   int
		}{{"%r10", 0}, {"%r10", 256}, {"%r11", 4096}, {"%r11", 4352}} {
			k.line("ld.shared.v4.f32 {%%f%d, %%f%d, %%f%d, %%f%d}, [%s+%d];", 72+4*i, 73+4*i, 74+4*i, 75+4*i, at.register, at.offset+512*row)
		}
		for value := range 64 {
			k.line("fma.rn.f32 %%f%d, %%f%d, %%f%d, %%f%[1]d;", value, 72+value/8, 80+value%8)
		}
	}
	k.line(`add.u64 %%d0, %%d0, %%d2;
add.u64 %%d1, %%d1, %%d2;
add.u32 %%r12, %%r12, 8;
setp.lt.u32 %%p0, %%r12, %%r5;
@%%p0 bra next;
mad.lo.u32 %%r4, %%r13, 4, %%r4;
mad.lo.u32 %%r3, %%r14, 4, %%r3;
mad.lo.u32 %%r4, %%r4, %%r5, %%r3;
mul.wide.u32 %%d3, %%r4, 4;
add.u64 %%d3, %%c, %%d3;
mul.wide.u32 %%d4, %%r5, 4;
mul.wide.u32 %%d5, %%r5, 240;`)
	for row := range 8 {
		for i := range 2 {
			v := 8*row + 4*i
			k.line("st.global.v4.f32 [%%d3+%d], {%%f%d, %%f%d, %%f%d, %%f%d};", 256*i, v, v+1, v+2, v+3)
		}
		k.line("add.u64 %%d3, %%d3, %%d4;")
		if row == 3 {
			k.line("add.u64 %%d3, %%d3, %%d5;") // 60 rows more
		}
	}
	return k.end()
}

// zero sets the first FP32 registers to 0.
func (k *kernel) zero(registers int) {
	for i := range registers {
		k.line("mov.f32 %%f%d, 0f00000000;", i)
	}
}

// tensorText is a product whose warps compute 64·64 values each, from fragments that every thread reads from memory as it needs them: 4 of a, and 4 of
// b, each of two columns of tiles.
func tensorText() string {
	k := newKernel(tensorKernel, "a", "b", "c", "n")
	k.global("a", "b", "c")
	k.line(`mov.u32 %%r0, %%tid.x;
and.b32 %%r1, %%r0, 31;
shr.u32 %%r2, %%r0, 5;
mov.u32 %%r3, %%ctaid.y;
mov.u32 %%r4, %%ctaid.x;
shr.u32 %%r8, %%r2, 1;
and.b32 %%r9, %%r2, 1;
shl.b32 %%r3, %%r3, 3;
shl.b32 %%r4, %%r4, 3;
mad.lo.u32 %%r3, %%r8, 4, %%r3;
mad.lo.u32 %%r4, %%r9, 4, %%r4;
cvt.u32.u64 %%r5, %%n;
shl.b32 %%r6, %%r5, 5;
cvt.u64.u32 %%d2, %%r6;
mul.wide.u32 %%d3, %%r1, 16;
mul.wide.u32 %%d4, %%r3, %%r6;
add.u64 %%d4, %%d4, %%d3;
add.u64 %%d4, %%a, %%d4;
mul.wide.u32 %%d8, %%r4, %%r6;
add.u64 %%d8, %%d8, %%d3;
add.u64 %%d8, %%b, %%d8;`)
	for i := 1; i < 4; i++ {
		k.line("add.u64 %%d%d, %%d%d, %%d2;\nadd.u64 %%d%d, %%d%d, %%d2;", 4+i, 3+i, 8+i, 7+i)
	}
	k.line("mov.u32 %%r7, 0;")
	k.zero(128)
	k.line("next:")
	for i := range 8 { // 4 of a, 4 of b
		r := 16 + 4*i
		k.line("ld.global.v4.u32 {%%r%d, %%r%d, %%r%d, %%r%d}, [%%d%d];", r, r+1, r+2, r+3, 4+i)
	}
	for value := range 32 {
		a, b, c := 16+4*(value/8), 32+2*(value%8), 4*value
		sums := fmt.Sprintf("{%%f%d, %%f%d, %%f%d, %%f%d}", c, c+1, c+2, c+3)
		k.line("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 %s, {%%r%d, %%r%d, %%r%d, %%r%d}, {%%r%d, %%r%d}, %[1]s;", sums, a, a+1, a+2, a+3, b, b+1)
	}
	for i := range 8 {
		k.line("add.u64 %%d%d, %%d%[1]d, 512;", 4+i)
	}
	k.line(`add.u32 %%r7, %%r7, 16;
setp.lt.u32 %%p0, %%r7, %%r5;
@%%p0 bra next;
shr.u32 %%r8, %%r1, 2;
and.b32 %%r9, %%r1, 3;
mad.lo.u32 %%r8, %%r3, 16, %%r8;
shl.b32 %%r9, %%r9, 1;
mad.lo.u32 %%r9, %%r4, 16, %%r9;
mad.lo.u32 %%r10, %%r8, %%r5, %%r9;
mul.wide.u32 %%d12, %%r10, 4;
add.u64 %%d12, %%c, %%d12;
mul.wide.u32 %%d14, %%r5, 32;`)
	for m := range 4 {
		k.line("add.u64 %%d13, %%d12, %%d14;") // 8 rows below
		for column := range 8 {
			v := 4 * (8*m + column)
			k.line("st.global.v2.f32 [%%d12+%d], {%%f%d, %%f%d};", 32*column, v, v+1)
			k.line("st.global.v2.f32 [%%d13+%d], {%%f%d, %%f%d};", 32*column, v+2, v+3)
		}
		k.line("add.u64 %%d12, %%d13, %%d14;")
	}
	return k.end()
}
