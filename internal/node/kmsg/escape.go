package kmsg

import (
	"fmt"
	"strings"
)

// maxEscaped is the maximum length of an escaped message, in bytes. A record has room for it and for its head.
const maxEscaped = recordSize - 64

// escapedByKernel reports whether the kernel writes a byte to /dev/kmsg as \xNN (kernel/printk/printk.c,
// msg_add_ext_text). syslog(2) has the byte itself.
func escapedByKernel(c byte) bool { return c == '\\' || unprintable(c) }

// unprintable reports whether a byte is no printable ASCII. A message of /dev/kmsg has none, one of a file may.
func unprintable(c byte) bool { return c < ' ' || c > '~' }

// escape returns a message with each byte that is to be escaped as \xNN. It cuts the message at maxEscaped.
func escape(message string, escaped func(byte) bool) string {
	var b strings.Builder
	from := 0 // the bytes before it are in b
	for i := range len(message) {
		if b.Len()+i-from >= maxEscaped {
			b.WriteString(message[from:i])
			return b.String()
		}
		if escaped(message[i]) {
			b.WriteString(message[from:i])
			fmt.Fprintf(&b, `\x%02x`, message[i])
			from = i + 1
		}
	}
	if from == 0 {
		return message
	}
	b.WriteString(message[from:])
	return b.String()
}
