package main

import (
	"bytes"

	"github.com/hashicorp/go-hclog"
)

// missing says, as a line of the log that Nomad reads, how many lines of it are missing.
func missing(lines int64) []byte {
	var line bytes.Buffer
	hclog.New(&hclog.LoggerOptions{Output: &line, JSONFormat: true}).
		Warn("lines of this log are lost: nobody read it", "lines", lines)
	return line.Bytes()
}
