package main

import (
	"bytes"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// changing are options of nvidia-smi that change something: by its manual, all but those of -q, -L, --query-* and lists.
var changing = []string{
	"-pm", "--persistence-mode", "-e", "--ecc-config", "-p", "--reset-ecc-errors", "-c", "--compute-mode", "--gom", "-r", "--gpu-reset",
	"-vm", "-lgc", "-lmc", "-rgc", "-rmc", "-ac", "-rac", "-pl", "--power-limit", "-am", "-caa", "-mig", "--multi-instance-gpu", "-fdm",
	"-cgi", "-dgi", "-cci", "-dci", "-C", "drain", "clocks", "-gtt", "-cc", "-sc",
}

// No command of the tables changes a GPU, and a command of an agent that is in no table is refused before it starts.
func TestOnlyReading(t *testing.T) {
	for name, args := range queries {
		for _, arg := range args {
			if slices.Contains(changing, arg) {
				t.Errorf("%s: nvidia-smi %v", name, args)
			}
		}
	}
	if !slices.Equal(verbs, []string{"inspect", "doctor", "quiesce", "resume", "prove-gpu"}) {
		t.Errorf("verbs %v", verbs)
	}
	o := options{bin: t.TempDir()}
	for _, verb := range []string{"clear", "ignore", "simulate", "rebind", "cdi", ""} {
		if _, err := o.verb(t.Context(), nomadGPU, "", verb); !errors.Is(err, errNotAllowed) {
			t.Errorf("nomad-gpu %s: %v", verb, err)
		}
	}
}

// Processes are started in these files only: the tables of commands.go, the C compiler and the CUDA program. No
// file calls a function of NVML that sets, resets, creates, destroys or clears something.
func TestOnlyTheseStartProcesses(t *testing.T) {
	starts := map[string]bool{}
	files := token.NewFileSet()
	err := filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(files, path, nil, 0)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			name := call.Sel.Name
			if of, ok := call.X.(*ast.Ident); ok && (of.Name == "exec" && strings.HasPrefix(name, "Command") || of.Name == "syscall" && strings.Contains(name, "Exec")) {
				starts[path] = true
			}
			if of, ok := call.X.(*ast.Ident); ok && (of.Name == "nvml" || of.Name == "Device") || strings.HasPrefix(path, "record") {
				for _, verb := range []string{"Set", "Reset", "Create", "Destroy", "Clear", "Freeze", "Modify"} {
					if strings.HasPrefix(name, verb) || strings.HasPrefix(name, "Device"+verb) {
						t.Errorf("%s: %s", files.Position(n.Pos()), name)
					}
				}
			}
			return true
		})
		return nil
	})
	must(t, err)
	want := map[string]bool{"commands.go": true, "cuda/cuda.go": true}
	for path := range starts {
		if !want[path] {
			t.Errorf("%s starts processes", path)
		}
	}
	if len(starts) != len(want) {
		t.Errorf("processes are started in %v", starts)
	}
}

func rootsOf(m *simdriver.Machine) core.Roots {
	return core.Roots{Driver: m.Root, Dev: m.Root, Sys: m.Root + "/sys", Proc: m.Root + "/proc"}
}

// Without a GPU there is one line and an exit code of its own. What else is missing is in the same line.
func TestNothingToCheck(t *testing.T) {
	empty := t.TempDir()
	noDriver := options{bin: empty, smi: "no-nvidia-smi", roots: core.Roots{Driver: empty, Dev: empty, Sys: empty, Proc: empty}, out: empty}
	m := simdriver.Start(t, "none")
	noGPU, noLibrary := noDriver, noDriver
	noGPU.roots = rootsOf(m)
	noLibrary.roots.Proc = m.Root + "/proc"
	const rest = "nvidia-smi, which is part of the driver; "
	for _, c := range []struct {
		o    options
		want string
	}{
		{noDriver, "no GPU here: NVIDIA's kernel module is not loaded (" + empty + "/driver/nvidia/version is missing); " + rest},
		{noGPU, "no GPU here: the driver has no GPU; " + rest},
		{noLibrary, "no GPU here: the driver can't be used: "},
	} {
		var out bytes.Buffer
		_, err := c.o.run(t.Context(), &out)
		if err == nil || !strings.HasPrefix(err.Error(), c.want) || !strings.Contains(err.Error(), "k8s-gpu: make build") || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
			t.Errorf("%v; output %q; want %q", err, out.String(), c.want)
		}
		if code := c.o.main(t.Context()); code != exitMissing {
			t.Errorf("exit code %d", code)
		}
	}
	withGPU := noDriver
	withGPU.roots = rootsOf(simdriver.Start(t, "t4"))
	if _, err := withGPU.run(t.Context(), &bytes.Buffer{}); err == nil || !strings.HasPrefix(err.Error(), "missing: "+rest) {
		t.Error(err)
	}
	if entries, err := os.ReadDir(empty); err != nil || len(entries) > 0 {
		t.Errorf("written without a GPU: %v, %v", entries, err)
	}
}
