// Package oneline makes one line of texts of other programs.
package oneline

import (
	"fmt"
	"strings"
	"unicode"
)

// Of returns a text in one printable line of at most so many bytes. What is no UTF-8 is "?".
func Of(text string, most int) string {
	const mark = "..."
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) { // line ends, too
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if text = strings.Join(strings.Fields(text), " "); len(text) > most {
		text = strings.ToValidUTF8(text[:most-len(mark)], "") + mark
	}
	return text
}

// Few returns the first of some names, and how many more there are.
func Few(names []string) string {
	const most = 2
	if len(names) <= most {
		return strings.Join(names, " and ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
