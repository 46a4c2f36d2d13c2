package proofcommand

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// Limits of what is kept of a command's output.
const (
	maxOutput  = 64 << 10
	maxLine    = 16 << 10 // the last line of stdout
	maxSummary = 200      // characters
	maxValues  = 32
)

// output is what the command prints: the end of both streams, and of stdout alone.
type output struct{ both, stdout Tail }

func newOutput() *output {
	return &output{both: Tail{limit: maxOutput}, stdout: Tail{limit: maxLine + 2}} // with the line breaks before and after the last line
}

// Tail is a writer that keeps the end of what is written. It takes everything, so that a program never waits. It is safe for concurrent use.
type Tail struct {
	mu    sync.Mutex
	limit int
	text  []byte
}

// NewTail returns one that keeps the end of a program's output, at most 64 KiB.
func NewTail() *Tail { return &Tail{limit: maxOutput} }

// Write never fails.
func (t *Tail) Write(text []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, text...)
	if len(t.text) > 2*t.limit { // not at each write, so that the text is moved seldom
		t.trim()
	}
	return len(text), nil
}

func (t *Tail) trim() { t.text = slices.Delete(t.text, 0, max(len(t.text)-t.limit, 0)) }

// String returns the end of what was written.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trim()
	return string(t.text)
}

// result reads what the command has printed: Output, Summary, Values and Note.
func (o *output) result() Result {
	r := Result{Output: oneline.Printable(o.both.String())}
	text := strings.TrimRightFunc(o.stdout.String(), unicode.IsSpace)
	line := text[strings.LastIndexByte(text, '\n')+1:]
	switch {
	case len(line) > maxLine:
		r.Note = fmt.Sprintf("the last line of stdout has more than %d bytes: it is not read", maxLine)
	case strings.HasPrefix(line, "{"):
		r.Summary, r.Values, r.Note = parseLine(line)
	default:
		r.Summary = summary(line)
	}
	return r
}

// parseLine reads {"summary": "...", "values": {"name": 1.5}}. What it does not understand is dropped, with a note: it is no evidence about a GPU.
func parseLine(line string) (text string, values map[string]float64, note string) {
	var fields map[string]json.RawMessage // not a struct, which would also take "Summary"
	if err := json.Unmarshal([]byte(line), &fields); err != nil {
		return "", nil, "the last line of stdout is not a JSON object: " + summary(err.Error())
	}
	var dropped []string
	if s, ok := fields["summary"]; ok && json.Unmarshal(s, &text) != nil {
		dropped = append(dropped, "summary is not a string")
	}
	var numbers map[string]json.RawMessage
	if v, ok := fields["values"]; ok && json.Unmarshal(v, &numbers) != nil {
		dropped = append(dropped, "values is not an object")
	}
	values = map[string]float64{}
	for _, name := range slices.Sorted(maps.Keys(numbers)) {
		n, err := parseValue(name, numbers[name])
		if err == nil && len(values) == maxValues {
			err = fmt.Errorf("value %s: there are more than %d", name, maxValues)
		}
		if err != nil {
			dropped = append(dropped, err.Error())
			continue
		}
		values[name] = n
	}
	if len(dropped) > 0 {
		note = fmt.Sprintf("dropped of the last line of stdout: %s (%d in all)", dropped[0], len(dropped))
	}
	return summary(text), values, note
}

// valueName is the form of the name of a value, which becomes the label of a metric.
var valueName = regexp.MustCompile(`^[a-z][a-z0-9_]{0,63}$`)

func parseValue(name string, text json.RawMessage) (float64, error) {
	if !valueName.MatchString(name) {
		return 0, fmt.Errorf("value %.64q: a name has at most 64 of a-z, 0-9 and _, and begins with a letter", name)
	}
	var n *float64 // nil for null
	if json.Unmarshal(text, &n) != nil || n == nil {
		return 0, fmt.Errorf("value %s: not a finite number", name)
	}
	return *n, nil
}

// summary is a text as one line, and not too long.
func summary(text string) string { return Line(text, maxSummary) }

// Line returns a text that a program chose as one line of at most some characters, which a terminal shows as they are.
func Line(text string, atMost int) string {
	line := []rune(oneline.Printable(strings.Join(strings.Fields(text), " ")))
	return string(line[:min(len(line), atMost)])
}
