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

	"github.com/tandem-gpu/tandem/internal/cli/command"
	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/operator/report"
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
		Name: "import", ArgsUsage: "[FILE]", MaxArgs: 1, Do: p.doImport,
		Usage: "print a configuration of " + p.Import.Of + " in the form of this agent, with a comment for each value that differs, has no effect or is not known; exit code 1 if none is known; FILE or - for standard input",
		Flags: []cli.Flag{
			text("from", "form of the input: "+strings.Join(p.Import.Formats, ", ")+"; detected if not given"),
			text("config", "name of one of several configurations in the input"),
			text("output", "file to write instead of printing; for several configurations a folder"),
			&cli.BoolFlag{Name: "force", Usage: "replace a file that exists"},
			&cli.BoolFlag{Name: "json", Usage: "print JSON: the files, the notes, and the places of all values that the files have with the same meaning"},
		},
	}
}

func (p Program) doImport(_ context.Context, c *cli.Command) error {
	format := c.String("from")
	if format != "" && !slices.Contains(p.Import.Formats, format) {
		return command.Usagef("import: --from %s: want one of %s", format, strings.Join(p.Import.Formats, ", "))
	}
	if c.Bool("json") && c.String("output") != "" {
		return command.Usagef("import: want --json or --output, not both")
	}
	path := c.Args().First()
	if path == "" {
		return command.Usagef("import: want a FILE, or - for standard input: see %s import --help", p.Name)
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
		return p.otherProgram(path, err)
	}
	files, err := r.One(c.String("config"))
	if err != nil {
		return fmt.Errorf("import: %w", err)
	}
	if c.Bool("json") {
		return report.WriteJSON(p.Stdout, imported{r.Kind, r.Default, described(files), importer.Sorted(r.Notes), r.Taken})
	}
	if len(files) == 0 || c.String("output") != "" { // else the notes are comments of what is printed
		for _, n := range r.Notes {
			fmt.Fprintln(p.Stderr, n)
		}
	}
	return p.putFiles(c, r, files)
}

// imported is the output of import --json.
type imported struct {
	Kind    string          `json:"kind"`
	Default string          `json:"default,omitempty"` // name of a file
	Files   []importedFile  `json:"files"`             // none if the input installs no device plugin
	Notes   []importer.Note `json:"notes"`
	Taken   []string        `json:"taken"`
}

type importedFile struct {
	Name string `json:"name,omitempty"`
	Text string `json:"text"`
}

func described(files []importer.File) []importedFile {
	all := []importedFile{}
	for _, f := range files {
		all = append(all, importedFile{f.Name, string(f.Text)})
	}
	return all
}

// otherProgram is err, unless the file is the configuration of a Nomad client and this program reads none.
func (p Program) otherProgram(path string, err error) error {
	if p.Import.Extension != ".hcl" && path != "-" && isClientConfig(path) {
		return fmt.Errorf("import: %s is the configuration of a Nomad client (HCL): want %s, or nomad-gpu import", path, p.Import.Of)
	}
	return err
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
