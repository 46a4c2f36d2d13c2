package document_test

import (
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config/document"
)

// The parser bounds the depth of a text, so a file of 3,000,000 levels is an error and no overflow of the stack.
func TestDepthIsBounded(t *testing.T) {
	const many = 3_000_000
	for _, c := range []struct{ name, text string }{
		{"lists", strings.Repeat("[", many)},
		{"mappings", strings.Repeat("{a: ", many)},
		{"JSON", strings.Repeat(`{"a":`, many) + "1" + strings.Repeat("}", many)},
		{"entries", strings.Repeat("- ", many) + "a"},
		{"keys", strings.Repeat("? ", many) + "a"},
	} {
		if err := document.Parse("c.yaml", []byte(c.text)).Err(); err == nil {
			t.Errorf("%s: no error", c.name)
		}
	}
	deep := strings.Repeat("[", 9000) + strings.Repeat("]", 9000)
	if err := document.Parse("c.yaml", []byte(deep)).Err(); err != nil {
		t.Error(err)
	}
}
