package docs

import (
	"fmt"
	"html"
	"regexp"
	"strings"
	"unicode/utf8"
)

// alarming are the words of a report that a picture has in red.
var alarming = regexp.MustCompile(`\b(unhealthy|lost)\b`)

// picture is a command and its output on a terminal, as SVG.
func picture(command, output string) string {
	const letter, line, margin = 7.2, 17, 16 // widths and heights in pixels, for a font of 12
	lines := append([]string{"$ " + command}, strings.Split(strings.TrimRight(output, "\n"), "\n")...)
	columns := 0
	var text strings.Builder
	for i, l := range lines {
		length := utf8.RuneCountInString(l)
		columns = max(columns, length)
		if l == "" {
			continue
		}
		kept := strings.ReplaceAll(html.EscapeString(l), " ", "&#160;") // several spaces would be one
		marked := alarming.ReplaceAllString(kept, `<tspan fill="#ff7b72">$1</tspan>`)
		// With a length the columns are below each other in any font.
		fmt.Fprintf(&text, `<text x="%d" y="%d" textLength="%.1f" lengthAdjust="spacingAndGlyphs">%s</text>`+"\n", margin, margin+line*(i+1)-5, letter*float64(length), marked)
	}
	width, height := int(letter*float64(columns))+2*margin, line*len(lines)+2*margin
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="12">
<rect width="100%%" height="100%%" rx="8" fill="#0d1117"/>
<g fill="#e6edf3">
%s</g>
</svg>
`, width, height, width, height, text.String())
}
