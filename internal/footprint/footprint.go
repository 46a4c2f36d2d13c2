// Package footprint keeps an agent small.
package footprint

import (
	"os"
	"runtime"
	"runtime/debug"
)

// Reduce trades collection time that nobody notices for memory that the node has for other things: an
// agent answers a few requests a minute and holds a few hundred kB. GOMAXPROCS and GOGC in the
// environment win. Call it once, first thing in main.
func Reduce() {
	if os.Getenv("GOMAXPROCS") == "" {
		runtime.GOMAXPROCS(min(2, runtime.NumCPU())) // each has caches of its own; one may sit in the driver
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(40)
	}
}
