//go:build e2e

package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// work is a process that has a GPU.
type work struct {
	pid  int
	env  map[string]string
	gpu  string
	seen time.Time // when the test found it
}

// marker is the time for which the works of a round sleep, by which the test finds their processes.
func marker(round int) string { return strconv.Itoa(1_000_000 + round) }

// processesOf returns the processes that sleep for so many seconds and have a GPU.
func processesOf(seconds string) []work {
	return worksThat(func(command string) bool { return strings.HasSuffix(command, "sleep\x00"+seconds+"\x00") })
}

// sleepers are the processes of all works.
func sleepers() []work {
	return worksThat(func(command string) bool { return strings.HasPrefix(command, "sleep\x00") })
}

// worksThat returns the processes that have a GPU and whose command line, with a NUL after each argument, matches.
func worksThat(match func(command string) bool) []work {
	var works []work
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		text, _ := os.ReadFile(file) // gone meanwhile: an empty line
		if !match(string(text)) {
			continue
		}
		w := work{env: map[string]string{}, seen: time.Now()}
		w.pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(file)))
		environ, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "environ"))
		for pair := range strings.SplitSeq(string(environ), "\x00") {
			key, value, _ := strings.Cut(pair, "=")
			w.env[key] = value
		}
		if w.gpu = w.env["NVIDIA_VISIBLE_DEVICES"]; w.gpu != "" {
			works = append(works, w)
		}
	}
	return works
}
