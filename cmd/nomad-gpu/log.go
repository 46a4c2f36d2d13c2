package main

import (
	"bytes"

	"github.com/hashicorp/go-hclog"
)

// lostLines is a line of the log, in the format that Nomad reads, about the lines that are missing from it.
func lostLines(lines int64) []byte {
	var line bytes.Buffer
	hclog.New(&hclog.LoggerOptions{Output: &line, JSONFormat: true}).Warn("log lines lost: the reader is too slow", "lines", lines)
	return line.Bytes()
}
