package nvidia

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
)

// A text of the driver is one printable line of UTF-8, whatever bytes it has. One that is stays as it is.
func TestCleanText(t *testing.T) {
	for text, want := range map[string]string{
		"NVIDIA H100 80GB HBM3": "NVIDIA H100 80GB HBM3", " Tesla T4 \n": "Tesla T4", "two  spaces": "two  spaces", "": "", "Größe": "Größe",
		"H100\xff80GB": "H100?80GB", "H100\x1b[31m": "H100 [31m", "\xc3": "?", "a\nb": "a b",
	} {
		if got := cleanText(text); got != want {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
	if got := cleanText(strings.Repeat("ä", maxText)); len(got) > maxText || !utf8.ValidString(got) {
		t.Errorf("%q", got)
	}
}

// The UUIDs that drivers write are those of identified devices, and no other text is.
func TestUUIDs(t *testing.T) {
	const uuid = "54d0709b-558d-5a59-9c65-0c5fc14a21a4"
	for _, id := range []string{"GPU-" + uuid, "MIG-" + uuid, uuid, "GPU-" + strings.ToUpper(uuid), "MIG-GPU-" + uuid + "/13/0"} {
		if !uuids.MatchString(id) {
			t.Errorf("%q is no UUID", id)
		}
	}
	for _, id := range []string{
		"", "N/A", "all", "GPU-", "GPU-" + uuid + "\n", " GPU-" + uuid, "GPU-" + uuid + "/1/0", "GPU-" + uuid[:35], "GPU-" + uuid + "0", "GPU-" + uuid + ",all",
		"GPU-" + strings.Replace(uuid, "5", "\xff", 1), "../" + uuid, "GPU-" + strings.Replace(uuid, "-", "=", 1),
	} {
		if uuids.MatchString(id) {
			t.Errorf("%q is a UUID", id)
		}
	}
}

// A name with odd bytes is cleaned. A GPU whose UUID is none is excluded, with the reason, as one whose UUID can't be
// read. The other GPUs are not affected.
func TestOddBytesOfTheDriver(t *testing.T) {
	m, s := start(t, "h100x8", open)
	before, err := s.Snapshot()
	must(t, err)
	for _, odd := range []string{"GPU-\xff8c4a1de-2f0c-4b43-9a52-6f3f0f0cafe2", "GPU-b8c4a1de-2f0c-4b43-9a52-6f3f0f0cafe2,all", "all"} {
		must(t, m.Set(2, "uuid", odd))
		must(t, m.Set(1, "name", "NVIDIA \xff\x1bH100"))
		must(t, m.Set(1, "serial", "16\xff50"))
		after, err := s.Snapshot()
		must(t, err)
		if len(after.Devices) != 7 || len(after.Excluded) != 1 {
			t.Fatalf("%q: %d devices, excluded %v", odd, len(after.Devices), after.Excluded)
		}
		if e := after.Excluded[0]; e.Failure != gpu.FailureError || !strings.Contains(e.Reason, "which is none") || !utf8.ValidString(e.Reason) {
			t.Errorf("%q: %+v", odd, e)
		}
		for _, d := range after.Devices {
			i := slices.IndexFunc(before.Devices, func(b gpu.Device) bool { return b.ID == d.ID })
			switch {
			case i < 0:
				t.Errorf("%q: %q is listed", odd, d.ID)
			case d.Index == 1 && d.Model != "NVIDIA ? H100":
				t.Errorf("the name is %q", d.Model)
			case d.Index != 1 && d != before.Devices[i]:
				t.Errorf("%q: a neighbour is %+v, was %+v", odd, d, before.Devices[i])
			}
		}
	}
	again := open(t, m) // for which the GPU is new
	first, err := again.Snapshot()
	must(t, err)
	if len(first.Devices) != 7 || len(first.Excluded) != 1 || first.Excluded[0].PCI == "" {
		t.Errorf("%d devices, excluded %+v", len(first.Devices), first.Excluded)
	}
	for _, d := range first.Devices {
		if !utf8.ValidString(d.Model + d.Serial) {
			t.Errorf("%+v", d)
		}
	}
}
