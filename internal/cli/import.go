package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// Import reads configurations of the plugin that this agent replaces.
type Import struct {
	Of        string   // the other plugin
	Formats   []string // of --from
	Extension string   // of the files of this agent: ".yaml"

	// Read returns the files of this agent. format is one of Formats, or "" = it is detected.
	Read func(path string, text []byte, format string) (importer.Result, error)
}

// maxInput limits an input in bytes.
const maxInput = 16 << 20

func (p Program) importVerb() verb {
	return verb{
		name: "import", argsUsage: "[FILE]", maxArgs: 1, do: p.doImport,
		usage: "print a configuration of " + p.Import.Of + " in the form of this agent, with a comment for what differs or has no effect; FILE or - for standard input",
		flags: []cli.Flag{
			text("from", "form of the input: "+strings.Join(p.Import.Formats, ", ")+"; detected if not given"),
			text("config", "name of one of several configurations in the input"),
			text("output", "file to write instead of printing; for several configurations a folder"),
			&cli.BoolFlag{Name: "force", Usage: "replace a file that exists"},
		},
	}
}

func (p Program) doImport(_ context.Context, c *cli.Command) error {
	format := c.String("from")
	if format != "" && !slices.Contains(p.Import.Formats, format) {
		return Usagef("import: --from %s: want one of %s", format, strings.Join(p.Import.Formats, ", "))
	}
	path := c.Args().First()
	if path == "" {
		return Usagef("import: want a FILE, or - for standard input: see %s import --help", p.Name)
	}
	input, err := readInput(path)
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	name := path
	if path == "-" {
		name = "stdin"
	}
	r, err := p.Import.Read(name, input, format)
	if err != nil {
		return err
	}
	files, err := r.One(c.String("config"))
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	if len(files) == 0 || c.String("output") != "" { // else the notes are comments of what is printed
		for _, n := range r.Notes {
			fmt.Fprintln(p.Stderr, n)
		}
	}
	return p.putFiles(c, r, files)
}

// putFiles prints the files, or writes them.
func (p Program) putFiles(c *cli.Command, r importer.Result, files []importer.File) error {
	output := c.String("output")
	switch {
	case len(files) == 0:
		fmt.Fprintf(p.Stderr, "%s: nothing to import: %s\n", p.Name, cmp.Or(r.Kind, "the input"))
		return nil
	case output == "":
		_, err := p.Stdout.Write(importer.Print(files, r.Default))
		return err
	}
	written, err := importer.Store(output, p.Import.Extension, files, c.Bool("force"))
	if err != nil {
		return fmt.Errorf("import: nothing is written: %w", err)
	}
	for _, path := range written {
		fmt.Fprintln(p.Stdout, path)
	}
	return nil
}

func readInput(path string) ([]byte, error) {
	in := io.Reader(os.Stdin)
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, err
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	text, err := io.ReadAll(io.LimitReader(in, maxInput+1))
	if err == nil && len(text) > maxInput {
		err = fmt.Errorf("%s has more than %d bytes", path, maxInput)
	}
	return text, err
}
