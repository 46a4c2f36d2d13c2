// Package importer has what both agents' imports of another plugin's configuration have in common: the result, and how it is printed
// and stored.
package importer

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Effect is how a setting of the other plugin relates to this agent.
type Effect string

// The effects, in the order in which they are listed.
const (
	Differs  Effect = "differs"   // the setting has another effect here, or had none there
	Needed   Effect = "needed"    // the agent needs it, and it is no part of the file
	NoEffect Effect = "no effect" // nothing here corresponds to it, and nothing is lost
	Unknown  Effect = "unknown"   // it is no setting of the other plugin that the import knows; it is left out
	Taken    Effect = "taken"     // the files have it with the same meaning; there is no note
)

var effects = []Effect{Unknown, Differs, Needed, NoEffect}

// Note is what a person should know of one setting.
type Note struct {
	Effect Effect `json:"effect"`
	Where  string `json:"where"`            // file, line and key, flag or variable of the input: "values.yaml:3: migStrategy"
	Text   string `json:"text"`             // what holds
	Remedy string `json:"remedy,omitempty"` // what to do; "" = nothing
}

// String is the note in one line.
func (n Note) String() string {
	text := fmt.Sprintf("%s: %s: %s", n.Effect, n.Where, n.Text)
	if n.Remedy != "" {
		text += "; " + n.Remedy
	}
	return text
}

// Notes are the notes about an input, in its order.
type Notes []Note

// Add adds a note.
func (n *Notes) Add(effect Effect, where, text, remedy string) {
	*n = append(*n, Note{effect, where, text, remedy})
}

// File is a configuration of this agent. Its text begins with the notes as comments.
type File struct {
	Name string // of a configuration that is one of several; "" = it is the only one
	Text []byte
}

// Result is an input in the form of this agent.
type Result struct {
	Kind    string   // of the input: "Helm values"
	Files   []File   // by name; none if the input installs no device plugin
	Default string   // name of the file that nodes without a choice use; "" = none
	Notes   []Note   // of all files
	Taken   []string // the places of the input's values that the files have with the same meaning
}

// Sorted returns notes by effect, each once, in the order of the input.
func Sorted(notes []Note) []Note {
	var sorted []Note
	seen := map[Note]bool{}
	for _, n := range notes {
		if !seen[n] {
			seen[n] = true
			sorted = append(sorted, n)
		}
	}
	slices.SortStableFunc(sorted, func(a, b Note) int {
		return cmp.Compare(slices.Index(effects, a.Effect), slices.Index(effects, b.Effect))
	})
	return sorted
}

// Header returns notes as comments, after a title.
func Header(title string, notes []Note) string {
	var b strings.Builder
	if len(notes) > 0 {
		title += " Notes:"
	}
	fmt.Fprintf(&b, "# %s\n", title)
	for _, n := range Sorted(notes) {
		fmt.Fprintf(&b, "# - %s\n", strings.ReplaceAll(n.String(), "\n", " "))
	}
	return b.String()
}

// One returns the file with a name, or all if it is "".
func (r Result) One(name string) ([]File, error) {
	if name == "" {
		return r.Files, nil
	}
	var names []string
	for _, f := range r.Files {
		if f.Name == name {
			return []File{f}, nil
		}
		names = append(names, cmp.Or(f.Name, "(one without a name)"))
	}
	return nil, fmt.Errorf("no configuration %q: the input has %s", name, cmp.Or(strings.Join(names, ", "), "none"))
}

// Print is the text of files: one as it is, several one after the other, each with its name. byDefault is the name of one of them.
func Print(files []File, byDefault string) []byte {
	var b bytes.Buffer
	for i, f := range files {
		if len(files) > 1 {
			if i > 0 {
				b.WriteString("\n---\n")
			}
			fmt.Fprintf(&b, "# Configuration %s", f.Name)
			if f.Name == byDefault {
				b.WriteString(", the default")
			}
			b.WriteString("\n")
		}
		b.Write(f.Text)
	}
	return b.Bytes()
}

// NothingError is the error of an input in which nothing is known.
type NothingError struct {
	Path, Kind string
	Notes      []Note // those of unknown values are shown
}

func (e *NothingError) Error() string {
	lines := []string{fmt.Sprintf("%s: nothing in it is known as %s", e.Path, e.Kind)}
	for _, n := range e.Notes {
		if n.Effect == Unknown {
			lines = append(lines, n.String())
		}
	}
	return strings.Join(lines, "\n")
}

// Problems is the error of an input that can't be imported: every problem in a line of its own.
func Problems(where string, problems []string) error {
	errs := make([]error, len(problems))
	for i, p := range problems {
		errs[i] = fmt.Errorf("%s: %s", where, p)
	}
	return errors.Join(errs...)
}

// Split returns the errors of an errors.Join; nil for nil.
func Split(err error) []error {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range joined.Unwrap() {
			all = append(all, Split(e)...)
		}
		return all
	}
	if err == nil {
		return nil
	}
	return []error{err}
}
