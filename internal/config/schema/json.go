package schema

import (
	"encoding/json"
	"io"
	"regexp"
	"strconv"
	"strings"
)

// draft is the version of JSON Schema.
const draft = "https://json-schema.org/draft/2020-12/schema"

// Write writes the JSON Schema of a file whose value has a type. In YAML a scalar need not be a string: 3, "3" and true are what the reader of the
// file takes as text, so each of them has the type of its text. A key without a value (null) is as if it were absent.
func Write(w io.Writer, title string, root Type) error {
	s := root.property()
	s["$schema"], s["title"] = draft, title
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	return e.Encode(s)
}

// node is a part of a JSON Schema.
type node = map[string]any

func anyOf(parts ...node) node {
	if len(parts) == 1 {
		return parts[0]
	}
	return node{"anyOf": parts}
}

// property is the schema of a key's value, which may be absent.
func (t Type) property() node {
	if t.Kind == Opaque {
		return node{}
	}
	return anyOf(orLiteral(t.parts(), nil)...)
}

// orLiteral adds null or "" to what is allowed. Within the only part, if that is possible: an editor has a better message then.
func orLiteral(parts []node, literal any) []node {
	if len(parts) == 1 {
		p := parts[0]
		if kind, ok := p["type"].(string); ok && literal == nil {
			p["type"] = []string{kind, "null"}
			return parts
		}
		if enum, ok := p["enum"].([]any); ok {
			p["enum"] = append(enum, literal)
			return parts
		}
	}
	return append(parts, node{"const": literal})
}

// value is the schema of a value.
func (t Type) value() node {
	if t.Kind == Opaque {
		return node{}
	}
	return anyOf(t.parts()...)
}

// parts are the schemas of which a value fulfils one. The first is the usual form, which editors offer.
func (t Type) parts() (parts []node) {
	switch {
	case t.Or != nil:
		for _, o := range t.Or {
			parts = append(parts, o.parts()...)
		}
	case t.Kind == Bool && t.Lenient:
		parts = []node{{"type": "boolean"}, {"enum": []any{0, 1}}, matching(`^(1|t|T|TRUE|true|True|0|f|F|FALSE|false|False)$`)}
	case t.Kind == Bool:
		parts = []node{{"type": "boolean"}, matching(`^(true|false)$`)}
	case t.Kind == Number:
		parts = t.numbers()
	case t.Kind == List:
		parts = t.lists()
	case t.Kind == Mapping:
		parts = t.mappings()
	case t.Kind == Object:
		parts = []node{t.object()}
	default:
		parts = t.scalars()
	}
	if t.Blank {
		parts = orLiteral(parts, "")
	}
	return parts
}

func matching(pattern string) node { return node{"type": "string", "pattern": pattern} }

func (t Type) numbers() []node {
	n := node{"type": "integer", "minimum": t.Min}
	if t.Max > 0 {
		n["maximum"] = t.Max
	}
	if t.Lenient {
		return []node{n, matching(`^\+?0*[1-9][0-9]*$`)} // strconv.Atoi
	}
	return []node{n, matching(`^[1-9][0-9]*$`)}
}

func (t Type) lists() []node {
	n := node{"type": "array", "items": t.Item.value()}
	if t.Min > 0 {
		n["minItems"] = t.Min
	}
	if t.Max > 0 {
		n["maxItems"] = t.Max
	}
	if !t.Lenient {
		return []node{n}
	}
	return append(append([]node{n}, t.Item.scalars()...), t.withCommas(t.Item.expression()))
}

// withCommas are the scalars that have such items, separated by commas, and at least Min of them (0 or 1).
func (t Type) withCommas(item string) node {
	optional := `\s*(` + item + `)?\s*`
	pattern := `^` + optional + `(,` + optional + `)*$`
	if t.Min > 0 {
		pattern = `^(\s*,)*\s*(` + item + `)\s*(,` + optional + `)*$`
	}
	return anyOf(scalarsLike(Type{Pattern: pattern})...)
}

func (t Type) mappings() []node {
	return []node{
		{"type": "object", "propertyNames": node{"pattern": t.Pattern}, "additionalProperties": OneOf(t.Values...).value()},
		t.withCommas(strings.Trim(t.Pattern, "^$") + `\s*=\s*(` + strings.Join(t.Values, "|") + `)`),
	}
}

func (t Type) object() node {
	properties, required := node{}, []string{}
	for _, k := range t.Keys {
		properties[k.Name] = k.describe()
		if k.Required {
			required = append(required, k.Name)
		}
	}
	n := node{"type": "object", "properties": properties, "additionalProperties": false}
	if len(required) > 0 {
		n["required"] = required
	}
	if t.Min > 0 {
		n["minProperties"] = t.Min
	}
	if t.Some != nil {
		var some []node
		for _, name := range t.Some {
			some = append(some, node{"required": []string{name}, "properties": node{name: node{"not": node{"type": "null"}}}})
		}
		n["anyOf"] = some
	}
	for _, c := range t.Cases {
		all, _ := n["allOf"].([]node)
		n["allOf"] = append(all, c.schema())
	}
	return n
}

func (c Case) schema() node {
	values, absent := []any{}, false
	for _, v := range c.Values {
		if absent = absent || v == ""; v == "" {
			values = append(values, nil)
		} else {
			values = append(values, v)
		}
	}
	condition := node{"properties": node{c.Key: node{"enum": values}}}
	if !absent {
		condition["required"] = []string{c.Key}
	}
	then := Type{Keys: c.Then}.object()
	delete(then, "additionalProperties")
	return node{"if": condition, "then": then}
}

// describe is the schema of a key with its description.
func (k Key) describe() node {
	n := k.property()
	if k.Required {
		n = k.value()
	}
	if k.Usage != "" {
		n["description"] = strings.ReplaceAll(k.Usage, "`", "")
	}
	if k.Default == "" {
		return n
	}
	n["default"] = literal(k.Default)
	return n
}

// literal is the usual form of a scalar in a file.
func literal(text string) any {
	if n, err := strconv.Atoi(text); err == nil {
		return n
	}
	if text == "true" || text == "false" {
		return text == "true"
	}
	return text
}

// scalars are Values, and what Pattern allows.
func (t Type) scalars() (parts []node) {
	if t.Values != nil {
		enum := []any{}
		for _, v := range t.Values {
			if enum = append(enum, literal(v)); enum[len(enum)-1] != any(v) {
				enum = append(enum, v)
			}
		}
		parts = append(parts, node{"enum": enum})
	}
	if t.Values == nil || t.Pattern != "" {
		parts = append(parts, scalarsLike(t)...)
	}
	return parts
}

// scalarsLike are the scalars that Pattern allows, among them numbers and bools if their texts match. A number is one if 7 is.
func scalarsLike(t Type) []node {
	if t.Pattern == "" {
		return []node{{"type": []string{"string", "number", "boolean"}}}
	}
	parts := []node{matching(t.Pattern)}
	form := regexp.MustCompile(t.Pattern)
	if form.MatchString("7") {
		n := node{"type": "integer"}
		if form.MatchString("7.5") {
			n["type"] = "number"
		}
		if !form.MatchString("-7") {
			n["minimum"] = 0
		}
		if t.Max > 0 {
			n["maximum"] = t.Max
		}
		parts = append(parts, n)
	}
	if form.MatchString("true") {
		parts = append(parts, node{"type": "boolean"})
	}
	return parts
}

// expression is a regular expression of the type's scalars.
func (t Type) expression() string {
	var all []string
	for _, v := range t.Values {
		all = append(all, regexp.QuoteMeta(v))
	}
	if t.Pattern != "" {
		all = append(all, strings.TrimSuffix(strings.TrimPrefix(t.Pattern, "^"), "$"))
	}
	if all == nil {
		return `[^,]+`
	}
	return strings.Join(all, "|")
}
