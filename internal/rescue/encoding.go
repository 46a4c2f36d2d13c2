package rescue

import (
	"encoding/json"
	"fmt"
)

// LedgerBytes is how large a ledger may be: what a Nomad variable holds.
const LedgerBytes = 64 << 10

// ParseLedger reads a ledger. One that this program can't have written is an error.
func ParseLedger(text []byte) (l Ledger, err error) {
	if err := json.Unmarshal(text, &l); err != nil {
		return l, err
	}
	return l, l.Check()
}

// Encode returns the text of the ledger; an error if it has more than LedgerBytes.
func (l Ledger) Encode() (string, error) {
	text, err := json.Marshal(l)
	if err == nil && len(text) > LedgerBytes {
		err = fmt.Errorf("the ledger has %d bytes, and %d are the most", len(text), LedgerBytes)
	}
	return string(text), err
}

// encoded is how many bytes a part of a ledger has; negative = it can't be written.
func encoded(part any) int {
	text, err := json.Marshal(part)
	if err != nil {
		return -1
	}
	return len(text)
}
