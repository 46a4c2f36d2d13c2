package cudaproof

import (
	"bytes"
	"cmp"
	"fmt"
	"time"
)

const (
	copySize = 32 * mebibyte
	copies   = 8 // at a time
)

// copies copies memory of the node to the GPU and back, and compares it on both sides.
func (p *proof) copies(size uint64, atLeast time.Duration) (err error) {
	buffers, release, err := p.buffers(size)
	if err != nil {
		return err
	}
	defer release(&err)
	source, err := p.pinned(size)
	if err != nil {
		return err
	}
	defer source.free(&err)
	target, err := p.pinned(size)
	if err != nil {
		return err
	}
	defer target.free(&err)
	there, done, back := 0.0, 0, 0.0
	for until := p.until(atLeast); done == 0 || time.Now().Before(until); done++ {
		if err := p.going(); err != nil {
			return err
		}
		to, from, err := p.copyBoth(buffers[0], source.memory, target.memory, patterns[done%len(patterns)])
		if err != nil {
			return err
		}
		there, back = there+to, back+from
	}
	gigabytes := float64(done) * copies * float64(size) / 1e9
	p.measured("h2d_gbps", gigabytes, there)
	p.measured("d2h_gbps", gigabytes, back)
	p.reportf("copies    %s to the GPU, %s from it", p.shown("h2d_gbps", "GB/s"), p.shown("d2h_gbps", "GB/s"))
	return nil
}

// copyBoth copies a pattern to the GPU and back several times, and returns the seconds of each way.
func (p *proof) copyBoth(at address, source, target []byte, with pattern) (to, from float64, err error) {
	with.write(source, 0)
	clear(target)
	repeat := func(do func() error) (float64, error) {
		return p.driver.timed(func() error {
			for range copies {
				if err := do(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if to, err = repeat(func() error { return p.driver.copyTo(at, source) }); err != nil {
		return 0, 0, err
	}
	found, err := p.find(func() error {
		return p.launch(checkKernel, p.wide(), uint64(at), uint64(len(source))/vectorSize, 0, uint64(with.seed), uint64(with.invert), uint64(p.findings))
	})
	if err != nil {
		return 0, 0, err
	}
	if found.count > 0 {
		return 0, 0, doubtf("%d words of a copy to the GPU are wrong, the first at byte %#x", found.count, found.offset)
	}
	if from, err = repeat(func() error { return p.driver.copyFrom(target, at) }); err != nil {
		return 0, 0, err
	}
	if !bytes.Equal(source, target) {
		return 0, 0, doubtf("a copy from the GPU is wrong: what it was made of is right")
	}
	return to, from, nil
}

// pinned is memory of the node that the GPU reads and writes by itself.
type pinned struct {
	memory []byte
	driver *driver
}

func (p *proof) pinned(size uint64) (pinned, error) {
	memory, err := p.driver.allocateHost(size)
	if err != nil {
		return pinned{}, fmt.Errorf("pinned memory of the node, %d MiB: %w", size/mebibyte, err)
	}
	return pinned{memory, p.driver}, nil
}

func (m pinned) free(err *error) { *err = cmp.Or(*err, m.driver.freeHost(m.memory)) }

// doubtf is the error of copies that are wrong. Each word is right in the GPU's memory, or was not tried there: the node's memory, the PCIe link and
// what is between them take part in a copy, so that this is no verdict on the GPU.
func doubtf(format string, args ...any) error {
	return fmt.Errorf("%s: the GPU, its PCIe link or the node's memory may be the cause", fmt.Sprintf(format, args...))
}
