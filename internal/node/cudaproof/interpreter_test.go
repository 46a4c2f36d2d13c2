package cudaproof

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// What follows runs the text of a kernel as the PTX ISA describes it, for the instructions that the kernels have. It refuses other ones, registers that are
// not declared, and registers of another type than the instruction has. Addresses are offsets in one memory.

type interpreter struct {
	t       *testing.T
	memory  []byte
	kernels map[string]*ptxKernel
}

type ptxKernel struct {
	params    []string
	declared  map[string]int  // "%r": 64
	named     map[string]bool // "%memory"
	registers map[string]int  // numbers of those that are used
	labels    map[string]int
	texts     []string
	code      []func(*ptxThread) // an instruction: it may set pc and state
}

type ptxThread struct {
	registers [512]uint64
	special   [len(ptxSpecial)]uint64
	shared    []byte
	params    []uint64
	pc        int
	state     threadState
}

type threadState int

const (
	runs threadState = iota
	atBarrier
	atMMA
	ended
)

var ptxSpecial = [...]string{"%tid.x", "%ntid.x", "%ctaid.x", "%ctaid.y", "%nctaid.x"}

var (
	ptxEntry   = regexp.MustCompile(`(?s)\.visible \.entry (\w+)\(([^)]*)\)\n\{\n(.*?)\n\}`)
	ptxRegs    = regexp.MustCompile(`^\.reg \.(\w+) (%\w+)(?:<(\d+)>)?$`)
	ptxOperand = regexp.MustCompile(`\{[^}]*\}|\[[^\]]*\]|[^,\s]+`)
)

func newInterpreter(t *testing.T, text string, memory int) *interpreter {
	t.Helper()
	in := &interpreter{t: t, memory: make([]byte, memory), kernels: map[string]*ptxKernel{}}
	for _, m := range ptxEntry.FindAllStringSubmatch(text, -1) {
		k := &ptxKernel{declared: map[string]int{}, named: map[string]bool{}, registers: map[string]int{}, labels: map[string]int{}}
		for p := range strings.SplitSeq(m[2], ", ") {
			k.params = append(k.params, strings.TrimPrefix(p, ".param .u64 "))
		}
		for line := range strings.SplitSeq(m[3], "\n") {
			in.line(k, line)
		}
		for _, text := range k.texts {
			k.code = append(k.code, in.instruction(k, text))
		}
		in.kernels[m[1]] = k
	}
	return in
}

func (in *interpreter) line(k *ptxKernel, line string) {
	if label, ok := strings.CutSuffix(line, ":"); ok {
		k.labels[label] = len(k.texts)
		return
	}
	text, ok := strings.CutSuffix(line, ";")
	if !ok {
		in.t.Fatalf("no end: %s", line)
	}
	switch r := ptxRegs.FindStringSubmatch(text); {
	case r == nil && strings.HasPrefix(text, ".shared "):
	case r == nil:
		k.texts = append(k.texts, text)
	case r[3] == "":
		k.named[r[2]] = true
	default:
		k.declared[r[2]], _ = strconv.Atoi(r[3])
	}
}

// register is the number of a register. It must be declared, and of the type of an instruction.
func (in *interpreter) register(k *ptxKernel, name, kind string) int {
	bank := strings.TrimRight(name, "0123456789")
	want := map[string]string{"u32": "%r", "b32": "%r", "u64": "%d", "b64": "%d", "f32": "%f", "pred": "%p"}[kind]
	n, err := strconv.Atoi(name[len(bank):])
	if named := k.named[name] && want == "%d"; !named && (err != nil || n >= k.declared[bank] || bank != want) {
		in.t.Fatalf("register %s: want one of %s that is declared", name, want)
	}
	if _, ok := k.registers[name]; !ok {
		k.registers[name] = len(k.registers)
	}
	return k.registers[name]
}

// value reads an operand of a type.
func (in *interpreter) value(k *ptxKernel, operand, kind string) func(*ptxThread) uint64 {
	if i := slices.Index(ptxSpecial[:], operand); i >= 0 {
		return func(t *ptxThread) uint64 { return t.special[i] }
	}
	if strings.HasPrefix(operand, "%") {
		r := in.register(k, operand, kind)
		return func(t *ptxThread) uint64 { return t.registers[r] }
	}
	digits, base := operand, 0
	switch {
	case operand == "tiles": // the only variable in shared memory
		digits = "0"
	case strings.HasPrefix(operand, "0f"):
		digits, base = operand[2:], 16
	}
	v, err := strconv.ParseUint(digits, base, 64)
	if err != nil || kind != "u64" && kind != "b64" && v > math.MaxUint32 {
		in.t.Fatalf("operand %s of %s: %v", operand, kind, err)
	}
	return func(*ptxThread) uint64 { return v }
}

// setter writes a register of a type.
func (in *interpreter) setter(k *ptxKernel, operand, kind string) func(*ptxThread, uint64) {
	r := in.register(k, operand, kind)
	if kind == "u64" || kind == "b64" {
		return func(t *ptxThread, v uint64) { t.registers[r] = v }
	}
	return func(t *ptxThread, v uint64) { t.registers[r] = v & math.MaxUint32 }
}

func float(v uint64) float32 { return math.Float32frombits(uint32(v)) }

// arithmetic are instructions that compute one value of a type from others of it.
var arithmetic = map[string]func(a, b, c uint64) uint64{
	"mov": first, "cvta.to.global": first, "not": func(a, _, _ uint64) uint64 { return ^a },
	"add": func(a, b, _ uint64) uint64 { return a + b }, "mul.lo": func(a, b, _ uint64) uint64 { return a * b }, "mad.lo": func(a, b, c uint64) uint64 { return a*b + c },
	"shl": func(a, b, _ uint64) uint64 { return a << b }, "shr": func(a, b, _ uint64) uint64 { return a >> b },
	"and": func(a, b, _ uint64) uint64 { return a & b }, "xor": func(a, b, _ uint64) uint64 { return a ^ b },
	"div": func(a, b, _ uint64) uint64 { return a / b }, "rem": func(a, b, _ uint64) uint64 { return a % b },
	"fma.rn": func(a, b, c uint64) uint64 {
		return uint64(math.Float32bits(float32(math.FMA(float64(float(a)), float64(float(b)), float64(float(c))))))
	},
	"mul.wide": func(a, b, _ uint64) uint64 { return a * b }, "cvt.u64": first, "cvt.u32": first,
}

func first(a, _, _ uint64) uint64 { return a }

// instruction compiles an instruction with its predicate.
func (in *interpreter) instruction(k *ptxKernel, text string) func(*ptxThread) {
	if !strings.HasPrefix(text, "@") {
		return in.plain(k, text)
	}
	predicate, rest, _ := strings.Cut(text[1:], " ")
	holds, do := in.value(k, predicate, "pred"), in.plain(k, rest)
	return func(t *ptxThread) {
		if holds(t) == 0 {
			t.pc++
			return
		}
		do(t)
	}
}

// plain compiles an instruction.
func (in *interpreter) plain(k *ptxKernel, text string) func(*ptxThread) {
	op, rest, _ := strings.Cut(text, " ")
	o := ptxOperand.FindAllString(rest, -1)
	words := strings.Split(op, ".")
	kind := words[len(words)-1]
	head := strings.TrimSuffix(op, "."+kind)
	stops := func(s threadState) func(*ptxThread) { return func(t *ptxThread) { t.state = s } }
	switch {
	case op == "ret":
		return stops(ended)
	case op == "bar.sync":
		return stops(atBarrier)
	case words[0] == "mma":
		return stops(atMMA)
	case op == "bra":
		to, ok := k.labels[o[0]]
		if !ok {
			in.t.Fatalf("no label %s", o[0])
		}
		return func(t *ptxThread) { t.pc = to }
	case head == "ld.param":
		set, n := in.setter(k, o[0], kind), slices.Index(k.params, strings.Trim(o[1], "[]"))
		return func(t *ptxThread) { set(t, t.params[n]); t.pc++ }
	case op == "mov.b64" && strings.HasPrefix(o[0], "{"):
		parts := strings.Split(strings.Trim(o[0], "{}"), ", ")
		low, high, from := in.setter(k, parts[0], "b32"), in.setter(k, parts[1], "b32"), in.value(k, o[1], "b64")
		return func(t *ptxThread) { low(t, from(t)); high(t, from(t)>>32); t.pc++ }
	case words[0] == "setp":
		return in.setp(k, words[1], kind, o)
	case op == "atom.global.add.u64":
		at, add, set := in.address(k, o[1], "global"), in.value(k, o[2], kind), in.setter(k, o[0], kind)
		return func(t *ptxThread) {
			old := binary.LittleEndian.Uint64(at(t))
			binary.LittleEndian.PutUint64(at(t), old+add(t))
			set(t, old)
			t.pc++
		}
	case words[0] == "ld" || words[0] == "st":
		return in.access(k, words, o)
	}
	return in.compute(k, head, kind, text, o)
}

func (in *interpreter) compute(k *ptxKernel, head, kind, text string, o []string) func(*ptxThread) {
	do, ok := arithmetic[head]
	if !ok {
		in.t.Fatalf("unknown instruction %s", text)
	}
	to := kind
	switch {
	case head == "mul.wide":
		to = "u64"
	case strings.HasPrefix(head, "cvt."):
		to = head[len("cvt."):]
	}
	set := in.setter(k, o[0], to)
	from := []func(*ptxThread) uint64{nil, nil, nil}
	for n := range from {
		from[n] = func(*ptxThread) uint64 { return 0 }
		if n+1 < len(o) {
			from[n] = in.value(k, o[n+1], kind)
		}
	}
	return func(t *ptxThread) { set(t, do(from[0](t), from[1](t), from[2](t))); t.pc++ }
}

func (in *interpreter) setp(k *ptxKernel, how, kind string, o []string) func(*ptxThread) {
	holds, ok := map[string]func(a, b uint64) bool{
		"eq": func(a, b uint64) bool { return a == b }, "ne": func(a, b uint64) bool { return a != b },
		"ge": func(a, b uint64) bool { return a >= b }, "lt": func(a, b uint64) bool { return a < b },
	}[how]
	if !ok {
		in.t.Fatal("unknown comparison ", how)
	}
	set, a, b := in.setter(k, o[0], "pred"), in.value(k, o[1], kind), in.value(k, o[2], kind)
	return func(t *ptxThread) {
		set(t, 0)
		if holds(a(t), b(t)) {
			set(t, 1)
		}
		t.pc++
	}
}

// address is the memory at an address.
func (in *interpreter) address(k *ptxKernel, operand, space string) func(*ptxThread) []byte {
	register, offset, _ := strings.Cut(strings.Trim(operand, "[]"), "+")
	add, _ := strconv.ParseUint(offset, 10, 64)
	if space == "shared" {
		from := in.value(k, register, "u32")
		return func(t *ptxThread) []byte { return t.shared[from(t)+add:] }
	}
	from := in.value(k, register, "u64")
	return func(t *ptxThread) []byte { return in.memory[from(t)+add:] }
}

// access is a load or store of one to four values. An address must be a multiple of their size.
func (in *interpreter) access(k *ptxKernel, words, o []string) func(*ptxThread) {
	kind, list, place := words[len(words)-1], o[0], o[1]
	store := words[0] == "st"
	if store {
		list, place = place, list
	}
	names := strings.Split(strings.Trim(list, "{}"), ", ")
	size := map[string]int{"u32": 4, "f32": 4, "u64": 8}[kind]
	if n := map[string]int{"v2": 2, "v4": 4}[words[2]]; max(n, 1) != len(names) || size == 0 {
		in.t.Fatal("unknown access ", words)
	}
	at := in.address(k, place, words[1])
	var gets []func(*ptxThread) uint64
	var sets []func(*ptxThread, uint64)
	for _, name := range names {
		gets, sets = append(gets, in.value(k, name, kind)), append(sets, in.setter(k, name, kind))
	}
	return func(t *ptxThread) {
		memory, whole := at(t), len(in.memory)
		if words[1] == "shared" {
			whole = len(t.shared)
		}
		if (whole-len(memory))%(size*len(names)) != 0 {
			in.t.Fatalf("misaligned: %v %v", words, o)
		}
		for n := range names {
			word := memory[size*n:]
			switch {
			case store && size == 8:
				binary.LittleEndian.PutUint64(word, gets[n](t))
			case store:
				binary.LittleEndian.PutUint32(word, uint32(gets[n](t)))
			case size == 8:
				sets[n](t, binary.LittleEndian.Uint64(word))
			default:
				sets[n](t, uint64(binary.LittleEndian.Uint32(word)))
			}
		}
		t.pc++
	}
}

// launch runs a grid.
func (in *interpreter) launch(kernel string, g grid, params ...uint64) {
	in.t.Helper()
	k := in.kernels[kernel]
	if k == nil || len(k.params) != len(params) {
		in.t.Fatalf("kernel %s with %d parameters", kernel, len(params))
	}
	for y := range g.y {
		for x := range g.x {
			shared := make([]byte, 8192)
			threads := make([]*ptxThread, g.threads)
			for i := range threads {
				threads[i] = &ptxThread{shared: shared, params: params, special: [...]uint64{uint64(i), uint64(g.threads), uint64(x), uint64(y), uint64(g.x)}}
			}
			in.block(k, threads)
		}
	}
}

// block runs threads until all have ended.
func (in *interpreter) block(k *ptxKernel, threads []*ptxThread) {
	for {
		states := map[threadState]int{}
		for _, t := range threads {
			for t.state == runs {
				k.code[t.pc](t)
			}
			states[t.state]++
		}
		switch len(threads) {
		case states[ended]:
			return
		case states[atBarrier]:
		case states[atMMA]:
			for w := 0; w < len(threads); w += 32 {
				in.mma(k, threads[w:w+32])
			}
		default:
			in.t.Fatalf("threads wait for different things: %v", states)
		}
		for _, t := range threads {
			t.state = runs
			t.pc++
		}
	}
}

// halfOf is a value of FP16.
func halfOf(bits uint16) float32 {
	if bits&0x7fff == 0 {
		return 0
	}
	v := math.Ldexp(float64(bits&0x3ff|0x400), int(bits>>10&31)-25)
	if bits>>15 == 1 {
		v = -v
	}
	return float32(v)
}

// mma is mma.m16n8k16 of a warp, with the fragments of the PTX ISA.
func (in *interpreter) mma(k *ptxKernel, warp []*ptxThread) {
	op, rest, _ := strings.Cut(k.texts[warp[0].pc], " ")
	if op != "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" {
		in.t.Fatal("unknown instruction ", op)
	}
	var registers [4][]int // d, a, b, c
	for n, list := range ptxOperand.FindAllString(rest, -1) {
		for name := range strings.SplitSeq(strings.Trim(list, "{}"), ", ") {
			registers[n] = append(registers[n], in.register(k, name, [...]string{"f32", "b32", "b32", "f32"}[n]))
		}
	}
	var a [16][16]float32
	var b [16][8]float32
	for lane, t := range warp {
		if t.pc != warp[0].pc {
			in.t.Fatal("the threads of a warp are at different instructions")
		}
		value := func(operand, n int) float32 {
			return halfOf(uint16(t.registers[registers[operand][n/2]] >> (n % 2 * 16)))
		}
		for n := range 8 { // a0 to a7
			a[lane/4+n/2%2*8][lane%4*2+n%2+n/4*8] = value(1, n)
		}
		for n := range 4 { // b0 to b3
			b[lane%4*2+n%2+n/2*8][lane/4] = value(2, n)
		}
	}
	for lane, t := range warp {
		for n := range 4 { // c0 to c3
			sum := float(t.registers[registers[3][n]])
			for m := range 16 {
				sum += a[lane/4+n/2*8][m] * b[m][lane%4*2+n%2]
			}
			t.registers[registers[0][n]] = uint64(math.Float32bits(sum))
		}
	}
}

func (in *interpreter) findings(at uint64) findings {
	word := func(i uint64) uint64 { return binary.LittleEndian.Uint64(in.memory[at+8*i:]) }
	return findings{word(0), word(1), word(2), word(3)}
}

var gpus = []device{{major: 5}, {major: 7}, {major: 7, minor: 5}, {major: 8}, {major: 9}, {major: 12}}

// The target of a GPU's program is not newer than the GPU.
func TestTargets(t *testing.T) {
	for _, g := range gpus {
		text := program(g)
		var major, minor, target int
		if _, err := fmt.Sscanf(text, ".version %d.%d\n.target sm_%d\n", &major, &minor, &target); err != nil || target > 10*g.major+g.minor {
			t.Errorf("%d.%d: %.40q, %v", g.major, g.minor, text, err)
		}
		if hasTensor := strings.Contains(text, "mma.sync"); hasTensor != (g.major >= 8) {
			t.Errorf("%d.%d: tensor cores %v", g.major, g.minor, hasTensor)
		}
	}
}

// The kernels write what the node computes, beyond 2^32 vectors, too, and find each word that differs.
func TestPatternKernels(t *testing.T) {
	const vectors, at, found = 1000, 64, 17000
	for _, first := range []uint64{0, 1<<32 - 500} {
		for i, with := range patterns {
			in := newInterpreter(t, program(gpus[i%len(gpus)]), 18000)
			params := []uint64{at, vectors, first, uint64(with.seed), uint64(with.invert)}
			g := grid{2, 1, 32}
			in.launch(fillKernel, g, params...)
			right := make([]byte, vectors*vectorSize)
			with.write(right, first)
			if string(in.memory[at:at+len(right)]) != string(right) || in.memory[at-1] != 0 || in.memory[at+len(right)] != 0 {
				t.Fatalf("pass %d writes another pattern", i)
			}
			in.launch(checkKernel, g, append(params, found)...)
			if f := in.findings(found); f != (findings{}) {
				t.Fatalf("pass %d, all right: %+v", i, f)
			}
			for _, word := range []uint64{0, 1, 2, 3, 3999} {
				in.memory[at+4*word] ^= 0x10
			}
			in.launch(checkKernel, g, append(params, found)...)
			f := in.findings(found)
			place, number := f.offset/vectorSize, f.offset%vectorSize/4
			if f.count != 5 || place < first || place >= first+vectors || f.wanted != uint64(with.vector(place)[number]) || f.there != f.wanted^0x10 {
				t.Errorf("pass %d, 5 words wrong: %+v", i, f)
			}
		}
	}
}

// No two words of the tested memory have the same neighbours: a word at the place of another one is found.
func TestPatternHasNoTwins(t *testing.T) {
	seen := map[[4]uint32]uint64{}
	for i := range uint64(1 << 16) {
		for _, place := range []uint64{i, i << 8, i << 19, 1<<32 + i} {
			v := patterns[0].vector(place)
			if other, ok := seen[v]; ok && other != place {
				t.Fatalf("places %d and %d have the same words", place, other)
			}
			seen[v] = place
		}
	}
}

// Both products are those of the table that the node computes, and the kernel compare finds what differs from it.
func TestProductKernels(t *testing.T) {
	const n = 2 * period
	for _, m := range []multiplication{product(n), tensor(n)} {
		const size = 4 * n * n
		const parts = n / period
		a, b := uint64(0), uint64(parts*len(m.a))
		c := b + uint64(parts*len(m.b))
		table := c + size
		found := table + 4*period*period
		in := newInterpreter(t, program(device{major: 8}), int(found)+findingsSize)
		copy(in.memory[a:], bytes.Repeat(m.a, parts))
		copy(in.memory[b:], bytes.Repeat(m.b, parts))
		for i, v := range m.table {
			binary.LittleEndian.PutUint32(in.memory[table+4*uint64(i):], math.Float32bits(v))
		}
		in.launch(m.kernel, grid{n / tile, n / tile, m.threads}, a, b, c, n)
		limit := map[string]int{productKernel: productLimit, tensorKernel: tensorLimit}[m.kernel]
		for _, place := range []int{0, 1, n - 1, n, 77*n + 200, 130*n + 3, n*n - 1} {
			sum := 0
			for k := range n {
				sum += operand(place/n, k, ofA, limit) * operand(k, place%n, ofB, limit)
			}
			if got := float(uint64(binary.LittleEndian.Uint32(in.memory[c+4*uint64(place):]))); got != float32(sum) {
				t.Errorf("%s, place %d: %v, want %d", m.kernel, place, got, sum)
			}
		}
		in.launch(compareKernel, grid{8, 1, 64}, c, table, n, found)
		if f := in.findings(found); f != (findings{}) {
			t.Errorf("%s, all right: %+v", m.kernel, f)
		}
		in.memory[c+4*(200*n+9)] ^= 1
		in.launch(compareKernel, grid{8, 1, 64}, c, table, n, found)
		if f := in.findings(found); f.count != 1 || f.offset != 4*(200*n+9) || f.wanted != uint64(math.Float32bits(m.table[200%period*period+9])) || f.there != f.wanted^1 {
			t.Errorf("%s, one value wrong: %+v", m.kernel, f)
		}
	}
}

// Every sum of the largest products is exact in FP32.
func TestSumsAreExact(t *testing.T) {
	for _, limit := range []int{productLimit, tensorLimit} {
		if limit*limit*defaultSize >= 1<<24 {
			t.Errorf("limit %d: sums up to %d", limit, limit*limit*defaultSize)
		}
	}
	for v := -tensorLimit; v <= tensorLimit; v++ {
		if got := halfOf(half(v)); got != float32(v) {
			t.Errorf("%d in FP16 is %v", v, got)
		}
	}
}
