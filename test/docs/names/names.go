// Package names has the names of the programs that the agents replace, and what docs/compatibility.md has about each: lists of names in
// test/docs/testdata/incumbents, and a table of the document for each list.
package names

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Answer is what the document has about a name: the second column of its tables.
type Answer string

// The answers.
const (
	Same       Answer = "same"        // the agents have the name, with the same meaning
	Differs    Answer = "differs"     // they have the name with another meaning, or the same under another name
	NotCovered Answer = "not covered" // they have nothing in its place
)

// Name is a name of a list.
type Name struct {
	Name   string
	Detail string // what the list has after a tab: a unit, or a file that has the name; "" = nothing
	Answer Answer
}

const (
	document = "docs/compatibility.md"
	folder   = "test/docs/testdata/incumbents"
	begin    = "<!-- names "
	end      = "<!-- end -->"
)

var codeSpan = regexp.MustCompile("`([^`]+)`")

// Read reads all lists, and what the document of the repository at root has about each of their names. It returns every problem: a name
// that is in no row or in several, a row that names nothing in the list, and a row without an answer or a reason.
func Read(root string) (map[string][]Name, error) {
	files, err := filepath.Glob(filepath.Join(root, folder, "*.txt"))
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(root, document))
	if err != nil {
		return nil, err
	}
	tables, err := tablesOf(string(text))
	errs := []error{err}
	lists := map[string][]Name{}
	for _, file := range files {
		list := strings.TrimSuffix(filepath.Base(file), ".txt")
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		names := parse(string(content))
		lists[list] = names
		rows, known := tables[list]
		if !known {
			errs = append(errs, fmt.Errorf("%s has no table %s", document, list))
		}
		errs = append(errs, answer(list, names, rows))
		delete(tables, list)
	}
	for name := range tables {
		errs = append(errs, fmt.Errorf("%s: there is no list for the table %s", document, name))
	}
	return lists, errors.Join(errs...)
}

// parse reads a list: one name a line, with a detail after a tab. Lines that begin with "# " are comments.
func parse(text string) (names []Name) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSuffix(line, "\n"); line == "" || strings.HasPrefix(line, "# ") {
			continue
		}
		name, detail, _ := strings.Cut(line, "\t")
		names = append(names, Name{Name: name, Detail: detail})
	}
	return names
}

// row is a row of a table.
type row struct {
	line     int
	patterns []string // names, or "a.*" for all that begin with "a."
	answer   Answer
	reason   string
}

// tablesOf finds the tables of a document, each between "<!-- names LIST -->" and "<!-- end -->".
func tablesOf(text string) (map[string][]row, error) {
	tables, list := map[string][]row{}, ""
	var errs []error
	for i, line := range strings.Split(text, "\n") {
		switch name, isBegin := strings.CutPrefix(line, begin); {
		case isBegin:
			list = strings.TrimSuffix(name, " -->")
			tables[list] = []row{}
		case line == end:
			list = ""
		case list != "" && strings.HasPrefix(line, "| `"):
			r, err := newRow(i+1, line)
			tables[list] = append(tables[list], r)
			errs = append(errs, err)
		}
	}
	return tables, errors.Join(errs...)
}

func newRow(number int, line string) (row, error) {
	cells := strings.Split(strings.Trim(line, "|"), "|")
	if len(cells) != 3 {
		return row{}, fmt.Errorf("%s:%d: %d columns, want 3", document, number, len(cells))
	}
	r := row{line: number, answer: Answer(strings.TrimSpace(cells[1])), reason: strings.TrimSpace(cells[2])}
	for _, m := range codeSpan.FindAllStringSubmatch(cells[0], -1) {
		r.patterns = append(r.patterns, m[1])
	}
	switch {
	case !slices.Contains([]Answer{Same, Differs, NotCovered}, r.answer):
		return r, fmt.Errorf("%s:%d: %q in the second column: want same, differs or not covered", document, number, r.answer)
	case r.answer != Same && r.reason == "":
		return r, fmt.Errorf("%s:%d: %s without a reason", document, number, r.answer)
	}
	return r, nil
}

// answer sets the answers of the names of a list.
func answer(list string, names []Name, rows []row) error {
	var errs []error
	lines := map[string][]int{} // of the rows that have a name
	for _, r := range rows {
		for _, pattern := range r.patterns {
			found := false
			for i := range names {
				if matches(pattern, names[i].Name) {
					found, names[i].Answer = true, r.answer
					lines[names[i].Name] = append(lines[names[i].Name], r.line)
				}
			}
			if !found {
				errs = append(errs, fmt.Errorf("%s:%d: %s: the list %s has no such name", document, r.line, pattern, list))
			}
		}
	}
	for _, n := range names {
		if at := lines[n.Name]; len(at) != 1 {
			errs = append(errs, fmt.Errorf("%s: %s of the list %s is in %d rows, want 1: lines %v", document, n.Name, list, len(at), at))
		}
	}
	return errors.Join(errs...)
}

func matches(pattern, name string) bool {
	prefix, all := strings.CutSuffix(pattern, "*")
	return pattern == name || all && strings.HasPrefix(name, prefix)
}

// Check compares the answer of a name with the program: has is nil if that has the name with the meaning that it has in the list, else how
// not.
func Check(list string, n Name, has error) error {
	switch {
	case n.Answer == Same && has != nil:
		return fmt.Errorf("%s: %s is not the same: %w", list, n.Name, has)
	case n.Answer == NotCovered && has == nil:
		return fmt.Errorf("%s: %s is there, and the document lists it as not covered", list, n.Name)
	}
	return nil
}
