package metrics

import (
	"bytes"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/operator/latency"
)

// ContentType is that of Page.Text: Prometheus' text format.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Page collects the samples of one scrape. It writes the text while it collects: the client library of Prometheus makes several
// objects for each sample, which takes five times as long (see docs/performance.md).
type Page struct{ families map[*Metric]*bytes.Buffer }

// NewPage returns an empty page.
func NewPage() *Page { return &Page{families: map[*Metric]*bytes.Buffer{}} }

// Reset makes the page empty. It keeps the memory for the next scrape, which has about the same text.
func (p *Page) Reset() {
	for _, b := range p.families {
		b.Reset()
	}
}

// Add adds a sample of a gauge or counter; labels are the values of m.Labels. No two samples may have the same labels.
func (p *Page) Add(m *Metric, v float64, labels ...string) { p.add(m, "", v, labels) }

// AddBool adds 1 for true, 0 for false.
func (p *Page) AddBool(m *Metric, v bool, labels ...string) {
	if v {
		p.add(m, "", 1, labels)
		return
	}
	p.add(m, "", 0, labels)
}

// AddSummary adds a sample of a summary; the sum is in the metric's unit.
func (p *Page) AddSummary(m *Metric, count uint64, sum float64, labels ...string) {
	p.add(m, "_sum", sum, labels)
	p.add(m, "_count", float64(count), labels)
}

// AddHistogram adds a sample of a histogram in seconds.
func (p *Page) AddHistogram(m *Metric, s latency.Snapshot, labels ...string) {
	for _, b := range s.Buckets {
		p.addBucket(m, strconv.FormatFloat(b.Bound.Seconds(), 'g', -1, 64), b.Count, labels)
	}
	p.addBucket(m, "+Inf", s.Count, labels)
	p.AddSummary(m, s.Count, s.Sum.Seconds(), labels...)
}

// family returns the text of a metric.
func (p *Page) family(m *Metric) *bytes.Buffer {
	b := p.families[m]
	if b == nil {
		b = &bytes.Buffer{}
		p.families[m] = b
	}
	return b
}

func (p *Page) add(m *Metric, suffix string, v float64, labels []string) {
	b := p.family(m)
	text := append(b.AvailableBuffer(), m.Name...)
	text = append(text, suffix...)
	text = appendLabels(text, m, labels)
	if len(labels) > 0 {
		text = append(text, '}')
	}
	text = append(appendNumber(append(text, ' '), v), '\n')
	b.Write(text)
}

func (p *Page) addBucket(m *Metric, bound string, count uint64, labels []string) {
	b := p.family(m)
	text := append(append(b.AvailableBuffer(), m.Name...), "_bucket"...)
	separator := byte('{')
	if text = appendLabels(text, m, labels); len(labels) > 0 {
		separator = ','
	}
	text = append(append(append(text, separator), `le="`...), bound...)
	text = append(text, `"} `...)
	b.Write(append(appendNumber(text, float64(count)), '\n'))
}

// appendLabels appends the labels without the closing bracket.
func appendLabels(text []byte, m *Metric, labels []string) []byte {
	for i, at := range m.order {
		text = append(text, m.openings[i]...)
		text = append(appendValue(text, labels[at]), '"')
	}
	return text
}

// appendValue appends a label value, escaped if necessary.
func appendValue(text []byte, value string) []byte {
	for i := range len(value) {
		if c := value[i]; c == '"' || c == '\\' || c == '\n' || c >= 0x80 {
			return append(text, labelEscapes.Replace(strings.ToValidUTF8(value, "\uFFFD"))...)
		}
	}
	return append(text, value...)
}

// What the text format escapes.
var (
	labelEscapes = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
	helpEscapes  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
)

// appendNumber appends a number as the client library of Prometheus does.
func appendNumber(text []byte, v float64) []byte {
	if n := int64(v); v >= 0 && v < 1e6 && float64(n) == v {
		return strconv.AppendInt(text, n, 10) // the same text, in a fifth of the time
	}
	return strconv.AppendFloat(text, v, 'g', -1, 64)
}

// Text appends the page in Prometheus' text format, the metrics by name.
func (p *Page) Text(text []byte) []byte {
	size := 0
	for m, b := range p.families {
		size += 2*len(m.Name) + len(m.Help) + 32 + b.Len()
	}
	text = slices.Grow(text, size)
	for _, m := range slices.SortedFunc(maps.Keys(p.families), func(a, b *Metric) int { return strings.Compare(a.Name, b.Name) }) {
		if p.families[m].Len() == 0 {
			continue
		}
		text = append(append(append(append(text, "# HELP "...), m.Name...), ' '), helpEscapes.Replace(m.Help)...)
		text = append(append(append(append(text, "\n# TYPE "...), m.Name...), ' '), m.Type...)
		text = append(append(text, '\n'), p.families[m].Bytes()...)
	}
	return text
}
