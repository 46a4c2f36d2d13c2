// Package oneline makes texts of other programs printable, and one line of them.
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

// Printable returns a text with its lines and tabs, and with "?" in place of all that a terminal would obey and of what is no
// UTF-8. It is not longer than the text.
func Printable(text string) string {
	return strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, text)
}

// Few returns the first of some names, and how many more there are.
func Few(names []string) string {
	const most = 2
	if len(names) <= most {
		return strings.Join(names, " and ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
