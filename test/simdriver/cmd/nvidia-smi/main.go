// Command nvidia-smi stands for NVIDIA's on a simulated machine, as far as agents call it: to reset a GPU, and for its persistence mode.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

func main() {
	program, err := os.Executable()
	if err == nil {
		var m *simdriver.Machine
		if m, err = simdriver.OfProgram(program); err == nil {
			os.Exit(m.SMI(context.Background(), os.Args[1:], os.Stdout))
		}
	}
	fmt.Fprintln(os.Stderr, "simulated nvidia-smi: which machine?", err)
	os.Exit(99)
}
