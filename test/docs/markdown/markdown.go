// Package markdown finds the parts of the documents that tests check: fenced blocks, links and anchors.
package markdown

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// Document is a file.
type Document struct {
	Path   string // from the root of the repository
	Blocks []Block
	Links  []Link
	IDs    []string // of the headings, as GitHub makes them
}

// Block is a fenced block.
type Block struct {
	Line     int    // of its first line of text, from 1
	Section  string // anchor of the heading above it
	Language string
	Text     string // without the indentation of the fence
}

// Link is a link to another place of the repository.
type Link struct {
	Line   int
	Target string // as written
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	code    = regexp.MustCompile("`[^`]*`")
	heading = regexp.MustCompile(`^#{1,6} +(.*)$`)
)

// Documents returns the documents for users and developers of a repository: the files of its root, docs, deploy and the simulated
// driver. The changelog is among them.
func Documents(root string) ([]Document, error) {
	var paths []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/adr/*.md", "deploy/*.md", "deploy/chart/*.md", "deploy/fleet-chart/*.md", "deploy/nomad/*.md", "test/simdriver/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			return nil, err
		}
		paths = append(paths, found...)
	}
	slices.Sort(paths)
	var all []Document
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		d := Parse(string(text))
		if d.Path, err = filepath.Rel(root, path); err != nil {
			return nil, err
		}
		all = append(all, d)
	}
	return all, nil
}

// Parse finds the parts of a text.
func Parse(text string) (d Document) {
	var open *Block
	indent, seen := "", map[string]int{}
	for i, line := range strings.Split(text, "\n") {
		trimmed := strings.TrimSpace(line)
		switch fence := strings.HasPrefix(trimmed, "```"); {
		case fence && open == nil:
			indent, _, _ = strings.Cut(line, "`")
			open = &Block{Line: i + 2, Language: strings.TrimPrefix(trimmed, "```")}
			if n := len(d.IDs); n > 0 {
				open.Section = d.IDs[n-1]
			}
		case fence:
			d.Blocks = append(d.Blocks, *open)
			open = nil
		case open != nil:
			open.Text += strings.TrimPrefix(line, indent) + "\n"
		default:
			if m := heading.FindStringSubmatch(line); m != nil {
				d.IDs = append(d.IDs, id(m[1], seen))
			}
			for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(line, "`"), -1) {
				d.Links = append(d.Links, Link{i + 1, m[1]})
			}
		}
	}
	return d
}

// id is the anchor of a heading: letters, digits, '-' and '_' of its text in lower case, with '-' for each space, and a number if it was
// used before.
func id(text string, seen map[string]int) string {
	text = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`).ReplaceAllString(text, "$1")
	name := strings.Map(func(r rune) rune {
		switch {
		case unicode.IsLetter(r) || unicode.IsDigit(r) || r == '-' || r == '_':
			return unicode.ToLower(r)
		case r == ' ':
			return '-'
		}
		return -1
	}, strings.TrimSpace(text))
	seen[name]++
	if n := seen[name]; n > 1 {
		name += "-" + string(rune('0'+n-1))
	}
	return name
}
