package ownership

import (
	"bytes"
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/test/check"
)

// eachBit calls decoded with each text that differs from a text in one bit, and with the text itself without its
// checksum, as an earlier version writes it. decoded returns an error, or whether the content is the same.
func eachBit(t *testing.T, text []byte, decoded func([]byte) (same bool, err error)) {
	t.Helper()
	earlier, err := statefile.Unseal(text)
	if err != nil || bytes.Equal(earlier, text) {
		t.Fatalf("%s has no checksum: %v", text, err)
	}
	if same, err := decoded(earlier); err != nil || !same {
		t.Errorf("without a checksum: %v", err)
	}
	refused := 0
	for i := range len(text) * 8 {
		damaged := bytes.Clone(text)
		damaged[i/8] ^= 1 << (i % 8)
		same, err := decoded(damaged)
		if err == nil && !same {
			t.Errorf("bit %d is read as another content: %s", i, damaged)
		}
		if errors.Is(err, statefile.ErrChecksum) {
			refused++
		}
	}
	if refused < len(text)*8/2 {
		t.Errorf("%d of %d bits are refused by the checksum", refused, len(text)*8)
	}
}

// A bit of the file of an agent that a disk has changed gives no GPU to another one.
func TestEachBitOfTheFileOfAnAgent(t *testing.T) {
	f := agentFile{
		agent: "nomad-gpu", boot: "b00t", started: now, devices: []device{{whole(1), 3, now}, {instance(2, 7), 4, now}},
		numbering: inventory.NewNumbering(1, []inventory.Number{
			{ID: coretest.GPU(1), Index: gpu.DeviceIndex{GPU: 1, Instance: -1}},
		}),
	}
	text, err := f.encode()
	check.NoError(t, err)
	eachBit(t, text, func(text []byte) (bool, error) {
		got, err := decode(text, "nomad-gpu")
		if err != nil && !errors.Is(err, errFormat) {
			t.Errorf("the error %v", err)
		}
		return got.equal(f), err
	})
}

// The same holds for the file of the node.
func TestEachBitOfTheFileOfTheNode(t *testing.T) {
	f := File{
		GPUs: map[gpu.DeviceID]Entry{coretest.GPU(1): {
			Target: inventory.DRA, Owner: inventory.Nomad, Epoch: 7, Settle: DefaultSettle, TargetRevision: 1_800_000_000_123,
		}},
		LocalAPIs: map[string]map[gpu.DeviceID]inventory.API{KubernetesAgent: {coretest.GPU(2): inventory.DRA}},
		Taken:     map[gpu.DeviceID]Mark{coretest.GPU(3): {Agent: NomadAgent, Purpose: inventory.Reset}},
	}
	text, err := f.Encode()
	check.NoError(t, err)
	eachBit(t, text, func(text []byte) (bool, error) {
		got, err := Decode(text)
		if err != nil && !errors.Is(err, ErrFormat) {
			t.Errorf("the error %v", err)
		}
		return got.Equal(f), err
	})
}
