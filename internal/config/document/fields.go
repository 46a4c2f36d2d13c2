package document

import (
	"slices"
	"strings"
)

// Pair is a key of a mapping and its value.
type Pair struct {
	Key   string
	Value Value
}

// Pairs are the pairs of a mapping in the order of the document; none for another value.
func (v Value) Pairs() (pairs []Pair) {
	if !v.IsMapping() {
		return nil
	}
	for pair := range slices.Chunk(v.node.Content, 2) {
		key := keyText(pair[0])
		pairs = append(pairs, Pair{key, Value{v.doc, pair[1], v.join(key), pair[0].Line}})
	}
	return pairs
}

func (v Value) join(key string) string {
	if v.path == "" {
		return key
	}
	return v.path + "." + key
}

// Fields are the values of a mapping by key.
type Fields struct {
	of     Value
	values map[string]Value
}

// maxListed limits the keys that an error lists.
const maxListed = 6

// Fields are the values of a mapping by known keys; none if it is absent. A value that is no mapping, an unknown key and a
// key that is given twice are problems.
func (v Value) Fields(known ...string) Fields {
	f := Fields{of: v, values: map[string]Value{}}
	switch {
	case !v.Given() || v.IsMapping():
	case len(known) > maxListed:
		v.Failf("want a mapping")
	default:
		v.Failf("want a mapping with %s", Choice(known))
	}
	seen := map[string]bool{}
	for _, pair := range v.Pairs() {
		switch {
		case seen[pair.Key]:
			pair.Value.Failf("given twice")
		case !slices.Contains(known, pair.Key):
			pair.Value.Failf("unknown key: %s", Meant(pair.Key, known))
		default:
			f.values[pair.Key] = pair.Value
		}
		seen[pair.Key] = true
	}
	return f
}

// At is the value of a key.
func (f Fields) At(key string) Value {
	if v, ok := f.values[key]; ok {
		return v
	}
	return Value{doc: f.of.doc, path: f.of.join(key), line: f.of.line}
}

// Given are the values of those keys that have one.
func (f Fields) Given(keys ...string) (given []Value) {
	for _, key := range keys {
		if v := f.At(key); v.Given() {
			given = append(given, v)
		}
	}
	return given
}

// Nearest is the name that the written text most likely means: the first one that contains it, or else the first with the
// smallest Levenshtein distance. Case is ignored. names must not be empty.
func Nearest(written string, names []string) string {
	written = strings.ToLower(written)
	return slices.MinFunc(names, func(a, b string) int { return distance(written, a) - distance(written, b) })
}

// Near is Nearest, if so few letters differ that a spelling mistake is likely.
func Near(written string, names []string) (name string, ok bool) {
	name = Nearest(written, names)
	return name, distance(strings.ToLower(written), name) <= min(len(written)/2, 3)
}

// maxChoice limits the names that Meant lists.
const maxChoice = 12

// Meant is what to write in place of an unknown name: the name of which it is likely a misspelling, or else all of them if they are few.
// names must not be empty.
func Meant(written string, names []string) string {
	switch name, ok := Near(written, names); {
	case ok:
		return "did you mean " + name + "?"
	case len(names) <= maxChoice:
		return "want " + Choice(names)
	}
	return "see docs/configuration.md"
}

// distance is 1 to a name that contains s, and the Levenshtein distance to others.
func distance(s, name string) int {
	name = strings.ToLower(name)
	if len(s) > 2 && s != name && strings.Contains(name, s) {
		return 1
	}
	from, to := []rune(s), []rune(name)
	row := make([]int, len(to)+1)
	for j := range row {
		row[j] = j
	}
	for i := range from {
		diagonal := row[0]
		row[0] = i + 1
		for j := range to {
			change := diagonal
			if from[i] != to[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(to)]
}
