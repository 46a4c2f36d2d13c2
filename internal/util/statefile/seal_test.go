package statefile_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/internal/util/statefile"
)

// A sealed text is JSON with one more member, and is the text again without it.
func TestSeal(t *testing.T) {
	for _, text := range []string{"{}", "{\n}\n", `{"a":1}`, "{\n\t\"a\": {\"checksum\": \"of another\"}\n}\n"} {
		sealed := statefile.Seal([]byte(text))
		var before, after map[string]any
		if err := errors.Join(json.Unmarshal([]byte(text), &before), json.Unmarshal(sealed, &after)); err != nil {
			t.Fatalf("%s: %v", sealed, err)
		}
		if len(after) != len(before)+1 || len(sealed) > len(text)+statefile.SealBytes {
			t.Errorf("%s becomes %s", text, sealed)
		}
		open, err := statefile.Unseal(sealed)
		if err != nil || !bytes.Equal(statefile.Seal(open), sealed) || !json.Valid(open) || bytes.Contains(open, []byte("crc32c")) {
			t.Errorf("%s becomes %s: %v", sealed, open, err)
		}
	}
	for _, text := range []string{"", "[]", "text", `{"a":1}`, `{"checksum": "crc32c:00000000", "a": 1}`} { // of an earlier version
		if open, err := statefile.Unseal([]byte(text)); err != nil || string(open) != text {
			t.Errorf("%q: %q, %v", text, open, err)
		}
	}
	if text := statefile.Seal([]byte("[]")); string(text) != "[]" {
		t.Errorf("%s", text)
	}
}

// Whatever byte of a sealed text is changed: the text is refused, or it is no JSON, or its content is the same.
func TestEachChangeOfASealedTextIsFound(t *testing.T) {
	text := statefile.Seal([]byte("{\n  \"gpu\": \"GPU-1\",\n  \"at\": [1, 2]\n}\n"))
	content, err := statefile.Unseal(text)
	if err != nil {
		t.Fatal(err)
	}
	var want map[string]any
	if err := json.Unmarshal(content, &want); err != nil {
		t.Fatal(err)
	}
	for i := range text {
		for mask := 1; mask < 256; mask++ {
			damaged := bytes.Clone(text)
			damaged[i] ^= byte(mask)
			open, err := statefile.Unseal(damaged)
			if err != nil || !json.Valid(open) {
				continue
			}
			var got struct {
				GPU string `json:"gpu"`
				At  []int  `json:"at"`
			}
			if err := json.Unmarshal(open, &got); err != nil || got.GPU != "GPU-1" || len(got.At) != 2 || got.At[0] != 1 || got.At[1] != 2 {
				t.Errorf("byte %d ^ %#x: %+v, %v", i, mask, got, err)
			}
		}
	}
}
