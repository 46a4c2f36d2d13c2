package statefile

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"regexp"
)

// ErrChecksum means that a record is not as it was written: a disk, a memory or a person has changed it.
var ErrChecksum = errors.New("it is damaged: its checksum is not that of its content")

// castagnoli is the table of CRC-32C, which differs after each change of up to three bits, and of up to 32 bits in a
// row.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sealed matches the end of a sealed text: the member and the end of the object.
var sealed = regexp.MustCompile(`,?\s*"checksum":\s*"([^"]*)"\s*\}\s*$`)

// SealBytes is at least how many bytes longer a sealed text is.
const SealBytes = 100

// Seal returns the text of a JSON object with a checksum of it as the last member. A program that does not know the
// member reads the text as before. A text that is no object stays as it is.
func Seal(text []byte) []byte {
	object, ok := bytes.CutSuffix(bytes.TrimRight(text, space), []byte("}"))
	if !ok {
		return text
	}
	object = bytes.TrimRight(object, space)
	comma := ","
	if bytes.HasSuffix(object, []byte("{")) {
		comma = ""
	}
	return fmt.Appendf(bytes.Clone(object), "%s\n  \"checksum\": \"%s\"\n}\n", comma, checksum(object))
}

// Unseal returns a text without its checksum. It fails with ErrChecksum if that is the checksum of another text. A text
// without a checksum, as an earlier version writes it, is returned as it is.
func Unseal(text []byte) ([]byte, error) {
	end := max(len(text)-SealBytes, 0)
	at := sealed.FindSubmatchIndex(text[end:])
	if at == nil {
		return text, nil
	}
	object := text[:end+at[0]]
	if string(text[end+at[2]:end+at[3]]) != checksum(object) {
		return nil, ErrChecksum
	}
	return append(bytes.Clone(object), "\n}\n"...), nil
}

const space = " \t\r\n"

func checksum(object []byte) string {
	return fmt.Sprintf("crc32c:%08x", crc32.Checksum(object, castagnoli))
}
