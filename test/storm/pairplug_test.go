package storm

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// renew enters that a GPU may look repaired.
func (p *pair) renew(n int, gpu gpu.DeviceID) {
	p.renewed[n] = time.Now()
	p.deals.repair(gpu)
}

// trouble is when a GPU was not to be read, or only now and then.
type trouble struct{ began, ended time.Time }

// quiet is after how long agents are through with a GPU that was not to be read.
const quiet = 3 * time.Second

func (p *pair) begin(n int) {
	if t := p.troubles[n]; time.Since(t.ended) > quiet {
		p.troubles[n] = trouble{began: time.Now()}
	}
}

// end enters that a GPU is to be read again. One that was not for so long that an agent may have forgotten it may be offered
// as something else.
func (p *pair) end(n int, gpu gpu.DeviceID) {
	t := p.troubles[n]
	t.ended = time.Now()
	p.troubles[n] = t
	p.deals.plug(gpu, time.Since(t.began) > forget/2)
}

// takeOut takes a GPU out of its slot: those behind it get other indices.
func (p *pair) takeOut(n int, gpu gpu.DeviceID) error {
	u := unplugged{uuid: gpu}
	for _, key := range []string{"uuid", "pci", "numa", "minor", "module_id", "board_id", "serial"} {
		v, err := p.Get(n, key)
		if err != nil {
			return err
		}
		u.lines = append(u.lines, key+" = "+v)
	}
	p.renew(n, gpu)
	p.begin(n)
	p.out[n] = u
	p.moves++
	p.journal.note("%.8s is taken out of slot %d", gpu, n)
	return p.Remove(n)
}

// putBack puts it into its slot again; it gets the last index.
func (p *pair) putBack(n int) error {
	u := p.out[n]
	delete(p.out, n)
	p.renew(n, u.uuid)
	p.journal.note("%.8s is put into slot %d", u.uuid, n)
	p.end(n, u.uuid)
	return p.Add(n, u.lines...)
}

// putAnother puts another GPU into the slot.
func (p *pair) putAnother(n int) error {
	u := p.out[n]
	delete(p.out, n)
	lines := slices.Clone(u.lines)
	uuid := fmt.Sprintf("GPU-%08x-%04x-4%03x-8%03x-%012x", p.random.Uint32(), p.random.Uint32()&0xffff,
		p.random.Uint32()&0xfff, p.random.Uint32()&0xfff, p.random.Uint64()&(1<<48-1))
	lines[0] = "uuid = " + uuid
	p.renewed[n] = time.Now()
	p.journal.note("%.8s is put into slot %d", uuid, n)
	p.troubles[n] = trouble{began: time.Now(), ended: time.Now()}
	p.deals.plug(gpu.DeviceID(uuid), false)
	return p.Add(n, lines...)
}

func unplug(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok {
		return errSkipped
	}
	p.later(p.away(), fmt.Sprintf("GPU %d is back", n), func() error { return p.putBack(n) })
	return p.takeOut(n, gpu)
}

// replaceGPU puts another GPU into the slot of one, at once or after a while.
func replaceGPU(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok {
		return errSkipped
	}
	if err := p.takeOut(n, gpu); err != nil {
		return err
	}
	if p.random.IntN(2) == 0 {
		return p.putAnother(n)
	}
	p.later(p.away(), fmt.Sprintf("another GPU %d", n), func() error { return p.putAnother(n) })
	return nil
}

// replug takes out a GPU and puts it in again at once: only the order of the GPUs has changed.
func replug(p *pair) error {
	n, gpu, ok := p.slot()
	if !ok {
		return errSkipped
	}
	return errors.Join(p.takeOut(n, gpu), p.putBack(n))
}

// lasting has a fault of a GPU end after a while.
func (p *pair) lasting(n int, name string, end func() error) {
	p.touched[n] = true
	p.begin(n)
	p.later(p.between(50*time.Millisecond, time.Second), fmt.Sprintf("%s GPU %d", name, n), func() error {
		delete(p.touched, n)
		p.renew(n, gpu.DeviceID(p.UUID(n)))
		p.end(n, gpu.DeviceID(p.UUID(n)))
		return end()
	})
}
