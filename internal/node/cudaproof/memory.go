package cudaproof

import (
	"cmp"
	"errors"
	"fmt"
	"time"
)

const (
	mebibyte   = 1 << 20
	largeChunk = 1 << 30
	smallChunk = 16 * mebibyte
	leftFree   = 128 * mebibyte // of what is free, at least: the driver allocates for its own purposes, too
)

// LeastMemory is the least share of the free memory that a proof tests, and the least share of all memory that is free.
const LeastMemory = 0.5

// chunk is memory of the test.
type chunk struct {
	at          address
	first, size uint64 // place in the pattern, in vectors; bytes
}

// memory writes patterns to most of the free memory, and compares it with them. Every pass writes all memory before it reads any, so that memory that
// is at two addresses is found.
func (p *proof) memory(atLeast time.Duration) (err error) {
	free, total, err := p.driver.memory()
	if err != nil {
		return err
	}
	want := uint64(float64(free) * p.Memory)
	if free > leftFree {
		want = min(want, free-leftFree)
	}
	want -= want % smallChunk
	if float64(free) < LeastMemory*float64(total) {
		return fmt.Errorf("%s of %s are free: want a share of at least %v: %s",
			sizeText(free), sizeText(total), LeastMemory, useOfOthers)
	}
	if want == 0 || float64(want) < LeastMemory*float64(free) {
		return fmt.Errorf("%s of %s that are free would be tested: want a share of at least %v",
			sizeText(want), sizeText(free), LeastMemory)
	}
	chunks, err := p.take(want)
	defer func() { err = cmp.Or(err, p.release(chunks)) }()
	if err != nil {
		return err
	}
	seconds, passes := 0.0, 0
	for until := p.until(atLeast); passes < len(patterns) || time.Now().Before(until); passes++ {
		took, err := p.pass(chunks, patterns[passes%len(patterns)], passes+1)
		if err != nil {
			return err
		}
		seconds += took
	}
	p.values["memory_tested_bytes"] = float64(want)
	p.measured("memory_gbps", 2*float64(passes)*float64(want)/1e9, seconds)
	p.reportf("memory    %s of %s written and read %d times, %s", sizeText(want), sizeText(total), passes, p.shown("memory_gbps", "GB/s"))
	return nil
}

// take allocates memory. With an error, what it returns is allocated, too.
func (p *proof) take(want uint64) (chunks []chunk, err error) {
	for taken, size := uint64(0), uint64(largeChunk); taken < want; {
		if err := p.going(); err != nil {
			return chunks, err
		}
		size = min(size, want-taken)
		at, err := p.driver.allocate(size)
		if e, ok := errors.AsType[*CallError](err); ok && e.Code == outOfMemory && size > smallChunk {
			size = max(size/2-size/2%smallChunk, smallChunk)
			continue
		}
		if err != nil {
			return chunks, fmt.Errorf("%s of %s that were free: %w", sizeText(taken), sizeText(want), err)
		}
		chunks = append(chunks, chunk{at, taken / vectorSize, size})
		taken += size
	}
	return chunks, nil
}

// release frees memory. After an error of a kernel no call of the context succeeds, and the first of them returns the reason.
func (p *proof) release(chunks []chunk) error {
	for _, c := range chunks {
		if err := p.driver.free(c.at); err != nil {
			return err
		}
	}
	return nil
}

// pass writes and compares all memory once, and returns how long the GPU took.
func (p *proof) pass(chunks []chunk, with pattern, number int) (seconds float64, err error) {
	run := func(kernel string, more ...uint64) (float64, error) {
		return p.driver.timed(func() error {
			for _, c := range chunks {
				params := []uint64{uint64(c.at), c.size / vectorSize, c.first, uint64(with.seed), uint64(with.invert)}
				if err := p.launch(kernel, p.wide(), append(params, more...)...); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := p.going(); err != nil {
		return 0, err
	}
	wrote, err := run(fillKernel)
	if err != nil {
		return 0, err
	}
	var read float64
	found, err := p.find(func() (err error) {
		read, err = run(checkKernel, uint64(p.findings))
		return err
	})
	if err != nil {
		return 0, err
	}
	if found.count > 0 {
		want := with.vector(found.offset / vectorSize)[found.offset%vectorSize/4]
		if found.there == uint64(want) && found.wanted != found.there {
			return 0, faultf("the GPU computes %#08x in place of %#08x, for byte %#x of the tested memory, in pass %d", found.wanted, want, found.offset, number)
		}
		if !found.real(want) {
			return 0, doubtf("the GPU has found wrong memory, and its note about it is wrong, too")
		}
		return 0, faultf("%d words of memory are wrong in pass %d, the first at byte %#x of the tested memory: %#08x in place of %#08x (bits %#08x)",
			found.count, number, found.offset, found.there, want, uint32(found.there)^want)
	}
	return wrote + read, nil
}

// sizeText is a size for people.
func sizeText(n uint64) string {
	if n >= largeChunk {
		return fmt.Sprintf("%.1f GiB", float64(n)/largeChunk)
	}
	return fmt.Sprintf("%d MiB", n/mebibyte)
}
