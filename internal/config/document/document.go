// Package document reads YAML documents. Each value has its path and line, so that an error can name them. Aliases and
// merge keys are expanded. Scalars are not interpreted: 0:1, 1e3 and 010 are the text that the file has.
package document

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Document is a YAML document and the problems found in it so far. It is not safe for concurrent use.
type Document struct {
	Path     string // of the file
	Text     []byte // of the file
	problems []problem
	root     *yaml.Node
}

// problem is an error and the line that it names; 0 = the file as a whole.
type problem struct {
	line int
	err  error
}

// Parse parses the text of the file at path: one YAML document, or none. If it can't, the document is empty and has the
// problem.
func Parse(path string, text []byte) *Document {
	d := &Document{Path: path, Text: text}
	root, err := decode(text)
	if err == nil && root != nil {
		root, err = Expand(root)
	}
	if err != nil {
		d.AddProblem(0, fmt.Errorf("%s%w", path, err))
		return d
	}
	d.root = root
	return d
}

// Root is the value of the document.
func (d *Document) Root() Value {
	v := Value{doc: d, node: d.root}
	if d.root != nil {
		v.line = d.root.Line
	}
	return v
}

// Problems is the number of problems found so far.
func (d *Document) Problems() int { return len(d.problems) }

// AddProblem adds a problem that names a line; math.MaxInt sorts it last.
func (d *Document) AddProblem(line int, err error) {
	d.problems = append(d.problems, problem{line, err})
}

// Err is errors.Join of all problems found so far in the order of their lines, each a *setting.Error or, if the text
// can't be parsed, the reason; nil if there is none.
func (d *Document) Err() error {
	slices.SortStableFunc(d.problems, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	errs := make([]error, len(d.problems))
	for i, p := range d.problems {
		errs[i] = p.err
	}
	return errors.Join(errs...)
}

// decode returns the value of the one document of a text; nil if there is none.
func decode(text []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var first *yaml.Node
	for {
		var next yaml.Node
		switch err := decoder.Decode(&next); {
		case errors.Is(err, io.EOF):
			return first, nil
		case err != nil:
			return nil, &syntaxError{text: strings.Join(strings.Fields(strings.TrimPrefix(err.Error(), "yaml: ")), " ")}
		case len(next.Content) == 0 || isNull(next.Content[0]):
		case first != nil:
			return nil, &syntaxError{next.Line, "another document begins: want one"}
		default:
			first = next.Content[0]
		}
	}
}

// syntaxError is the reason why a text is no document. It follows the path of the file.
type syntaxError struct {
	line int // 0 = the text names it
	text string
}

func (e *syntaxError) Error() string {
	if e.line == 0 {
		return ": " + e.text
	}
	return fmt.Sprintf(":%d: %s", e.line, e.text)
}
