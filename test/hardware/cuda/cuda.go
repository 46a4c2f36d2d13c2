// Package cuda runs a program that uses the CUDA driver in the environment of a reservation: it allocates memory and runs a kernel.
package cuda

import (
	"bufio"
	"context"
	_ "embed" // the program
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed program/probe.c
var source string

// Compile compiles the program into a folder, and returns its path.
func Compile(ctx context.Context, dir string) (string, error) {
	text, program := filepath.Join(dir, "probe.c"), filepath.Join(dir, "cuda-probe")
	if err := os.WriteFile(text, []byte(source), 0o644); err != nil {
		return "", err
	}
	if out, err := exec.CommandContext(ctx, "cc", "-O1", "-Wall", "-o", program, text, "-ldl").CombinedOutput(); err != nil {
		return "", fmt.Errorf("cc: %w: %s", err, out)
	}
	return program, nil
}

// Process is a program that holds memory of the devices that it sees.
type Process struct {
	Devices  []string // their UUIDs, without "GPU-" and "MIG-"
	Names    []string
	Failures []string // "0 cuMemAlloc CUDA_ERROR_OUT_OF_MEMORY (2)"
	Kernels  int      // devices on which memory and kernel were right

	cmd   *exec.Cmd
	stdin io.Closer
}

// Start runs the program with only these variables beside the search paths, and returns when it holds memory or has ended.
func Start(ctx context.Context, program, library string, env map[string]string) (*Process, error) {
	p := &Process{cmd: exec.CommandContext(ctx, program, library)}
	for _, name := range []string{"PATH", "LD_LIBRARY_PATH", "HOME", "STUB_CUDA_FAULT"} {
		if value, ok := os.LookupEnv(name); ok {
			p.cmd.Env = append(p.cmd.Env, name+"="+value)
		}
	}
	for name, value := range env {
		p.cmd.Env = append(p.cmd.Env, name+"="+value)
	}
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("cuda program: %w", err)
	}
	p.stdin = stdin
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if p.read(lines.Text()) {
			return p, nil
		}
	}
	err = p.cmd.Wait()
	if len(p.Failures) == 0 {
		p.Failures = append(p.Failures, fmt.Sprint("the program ended: ", err))
	}
	p.cmd = nil
	return p, nil
}

// read takes one line, and reports whether the program is holding memory.
func (p *Process) read(line string) bool {
	kind, rest, _ := strings.Cut(line, " ")
	words := strings.SplitN(rest, " ", 3)
	switch kind {
	case "device":
		if len(words) == 3 {
			p.Devices, p.Names = append(p.Devices, words[1]), append(p.Names, words[2])
		}
	case "failed":
		p.Failures = append(p.Failures, rest)
	case "memory", "kernel":
		if !slices.Contains(words, "ok") {
			p.Failures = append(p.Failures, line)
		} else if kind == "kernel" {
			p.Kernels++
		}
	case "holding":
		return true
	}
	return false
}

// PID is that of a program that holds memory; 0 if it has ended.
func (p *Process) PID() int {
	if p.cmd == nil {
		return 0
	}
	return p.cmd.Process.Pid
}

// End releases the memory.
func (p *Process) End() error {
	if p.cmd == nil {
		return nil
	}
	err := p.stdin.Close()
	if waited := p.cmd.Wait(); waited != nil && len(p.Failures) == 0 {
		return waited
	}
	return err
}
