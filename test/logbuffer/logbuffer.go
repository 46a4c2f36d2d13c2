// Package logbuffer has what the tests of all packages give to a logger or a process, to read what was written so far.
package logbuffer

import (
	"bytes"
	"sync"
)

// Buffer keeps what is written to it. The zero value is empty; it is safe for concurrent use.
type Buffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write appends p. It does not fail.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// String returns what was written so far.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
