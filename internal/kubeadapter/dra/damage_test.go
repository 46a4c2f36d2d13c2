package dra

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// damaged is an adapter that has been started again since the record of the claim "a", of GPU 0, was damaged. It runs
// nothing. The claim "twin" is allocated to GPU 0, too, after the pod of "a" was deleted by force; "other" is allocated
// to GPU 1.
type damaged struct {
	*rig
	record string
	text   []byte   // of the record, as it was
	cdi    []string // of the claim "a"
}

func newDamaged(t *testing.T) *damaged {
	t.Helper()
	d := &damaged{rig: newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()))}
	for name, n := range map[string]int{"a": 0, "twin": 0, "other": 1} {
		d.api.put(newClaim(name, result(coretest.GPU(n))))
	}
	d.cdi = d.mustPrepare("a")[0].GetCdiDeviceIds()
	d.record = d.adapter.store.Load().Path(uidOf("a"))
	text, err := os.ReadFile(d.record)
	d.must(err)
	d.text = text
	d.stop()
	return d
}

// restart starts an adapter with another text of the record, and asks the kubelet once.
func (d *damaged) restart(text []byte, answer PodClaims) *Adapter {
	d.Helper()
	d.must(os.WriteFile(d.record, text, 0o600))
	o := d.adapter.opts
	o.PodClaims = func(context.Context) (PodClaims, error) { return answer, nil }
	a := New(d.src, o)
	a.limits.queryFirst = 0
	store, err := prepared.Open(a.claimsDir(), boot, nil)
	d.must(err)
	a.store.Store(store)
	close(a.loaded)
	a.queryPods(d.ctx, time.Second)
	a.derive()
	return a
}

// reserve tries to reserve the devices of a claim.
func (d *damaged) reserve(a *Adapter, name string) error {
	d.Helper()
	claim, err := d.api.Claim(d.ctx, "default", name)
	d.must(err)
	r, err := a.newRequest(claimRef{"default", name, uidOf(name)}, claim)
	d.must(err)
	_, _, err = a.tryReserve(r, a.store.Load())
	return err
}

// damages returns texts of the record that differ in one bit or in several.
func (d *damaged) damages() (all [][]byte) {
	seed := rand.New(rand.NewPCG(1, 2))
	for i := range d.text {
		one := bytes.Clone(d.text)
		one[i] ^= 1 << (i % 8)
		several := bytes.Clone(d.text)
		several[i] ^= byte(seed.IntN(255) + 1)
		if i%5 == 0 {
			several[seed.IntN(len(several))] ^= byte(seed.IntN(255) + 1)
		}
		all = append(all, one, several)
	}
	all = append(all, nil, d.text[:len(d.text)/2], make([]byte, len(d.text)))
	// The neighbour's UUID in one place each.
	for _, pair := range [][2]string{{string(coretest.GPU(0)), string(coretest.GPU(1))}, {deviceName(coretest.GPU(0)), deviceName(coretest.GPU(1))}} {
		for n := 1; n <= bytes.Count(d.text, []byte(pair[0])); n++ {
			parts := strings.SplitN(string(d.text), pair[0], n+1)
			text := strings.Join(parts[:n], pair[0]) + pair[1] + parts[n]
			all = append(all, []byte(text))
		}
	}
	return all
}

// Whatever is changed in the record of a claim whose pod runs: after a restart its GPU goes to no second claim, and the
// claim gets no other GPU's CDI name. The other GPU is given out.
func TestDamagedRecordGivesNoGPUToASecondClaim(t *testing.T) {
	d := newDamaged(t)
	listed := PodClaims{Claims: []PodClaim{podClaim("a", deviceName(coretest.GPU(0)))}}
	listed.Claims[0].CDI = d.cdi
	claimA, err := d.api.Claim(d.ctx, "default", "a")
	d.must(err)
	t.Run("the pod is listed", func(t *testing.T) {
		for _, text := range d.damages() {
			a := d.restart(text, listed)
			if err := d.reserve(a, "twin"); err == nil {
				t.Fatalf("GPU 0 has two claims after %q", text)
			}
			if err := d.reserve(a, "other"); err != nil {
				t.Fatalf("GPU 1 is not given out: %v after %q", err, text)
			}
			c, err := a.prepare(d.ctx, claimRef{"default", "a", uidOf("a")}, &step{})
			if err != nil || !slices.Equal(c.Results[0].CDI, d.cdi) || c.Results[0].At != gpu.WholeGPU(coretest.GPU(0)) {
				t.Fatalf("%+v, %v after %q", c.Results, err, text)
			}
		}
	})
	t.Run("the claim was deleted by force", func(t *testing.T) {
		d.api.remove(claimA)
		defer d.api.put(claimA)
		for _, text := range d.damages() {
			a := d.restart(text, listed)
			if err := d.reserve(a, "twin"); err == nil {
				t.Fatalf("GPU 0 has two claims after %q", text)
			}
			if err := d.reserve(a, "other"); isNotOfNeighbour(err) {
				t.Fatalf("GPU 1 is not given out: %v after %q", err, text)
			}
		}
	})
	t.Run("the list may lack pods", func(t *testing.T) {
		for _, text := range d.damages() {
			a := d.restart(text, PodClaims{Partial: true})
			if err := d.reserve(a, "twin"); err == nil {
				t.Fatalf("GPU 0 has two claims after %q", text)
			}
			err := d.reserve(a, "other")
			if cordoned, ok := errors.AsType[*CordonedError](err); ok && strings.Contains(cordoned.Reason, "can't be read") {
				continue // any GPU may be of the claim, and the event has the reason
			}
			if isNotOfNeighbour(err) {
				t.Fatalf("GPU 1 is not given out: %v after %q", err, text)
			}
		}
	})
}

// isNotOfNeighbour reports whether a claim is refused, but because a damaged record names its GPU.
func isNotOfNeighbour(err error) bool {
	_, named := errors.AsType[*UnreadError](err)
	return err != nil && !named
}

// The event of a claim that is refused because of a damaged record names the file if the record is of the same
// namespace. Another namespace's event has neither UID nor namespace of the claim.
func TestEventsNameClaimsOfTheirNamespaceOnly(t *testing.T) {
	d := newDamaged(t)
	twin, err := d.api.Claim(d.ctx, "default", "twin")
	d.must(err)
	for _, is := range []string{`"GI": 4294967294`, `"GI": 429496729%`} { // the second one is no JSON
		text := bytes.Replace(d.text, []byte(`"GI": 4294967295`), []byte(is), 1)
		a := d.restart(text, PodClaims{Partial: true})
		for namespace, same := range map[string]bool{"default": true, "tenant": false} {
			r, err := a.newRequest(claimRef{namespace, "twin", uidOf("twin")}, twin)
			d.must(err)
			_, wait, err := a.tryReserve(r, a.store.Load())
			if err == nil || !wait {
				t.Fatalf("%v, %t", err, wait)
			}
			event := oneLine(err)
			if strings.Contains(event, d.record) != same || strings.Contains(event, uidOf("a")) != same || !strings.Contains(event, "can't be read") {
				t.Errorf("namespace %s: %s", namespace, event)
			}
		}
	}
	v := admission{foreign: []obstacle{{"default", "pod default/old has a device of claim default/old"}}}
	if text := v.textFor("default"); text != v.foreign[0].text {
		t.Error(text)
	}
	if text := v.textFor("tenant"); strings.Contains(text, "old") || text == "" {
		t.Error(text)
	}
}
