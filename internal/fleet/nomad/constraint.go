package nomad

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/hashicorp/nomad/api"
)

// meetsNode reports whether a node meets a constraint of a job for certain. It returns an error for one that this program can't evaluate.
func meetsNode(c *api.Constraint, n *api.Node) (bool, error) {
	left, leftOK := nodeTarget(c.LTarget, n)
	right, rightOK := nodeTarget(c.RTarget, n)
	switch c.Operand {
	case api.ConstraintDistinctHosts:
		return true, nil // spec.distinct has it
	case "!=", "not":
		return left != right, nil
	case "<", "<=", ">", ">=":
		return leftOK && rightOK && ordered(c.Operand, compareTexts(left, right)), nil
	}
	return meets(c.Operand, left, right, leftOK, rightOK)
}

// meets evaluates what is the same for nodes and devices.
func meets(operand, left, right string, leftOK, rightOK bool) (bool, error) {
	both := leftOK && rightOK
	switch operand {
	case "=", "==", "is":
		return both && left == right, nil
	case api.ConstraintAttributeIsSet:
		return leftOK, nil
	case api.ConstraintAttributeIsNotSet:
		return !leftOK, nil
	case api.ConstraintVersion:
		return both && meetsVersion(left, right, false), nil
	case api.ConstraintSemver:
		return both && meetsVersion(left, right, true), nil
	case api.ConstraintRegex:
		e, err := regexp.Compile(right)
		return both && err == nil && e.MatchString(left), nil
	case api.ConstraintSetContains, api.ConstraintSetContainsAll:
		return both && !slices.ContainsFunc(list(right), func(one string) bool { return !slices.Contains(list(left), one) }), nil
	case api.ConstraintSetContainsAny:
		return both && slices.ContainsFunc(list(right), func(one string) bool { return slices.Contains(list(left), one) }), nil
	}
	return false, fmt.Errorf("a constraint with the operator %q", operand)
}

// list returns the elements of a list as constraints have it.
func list(text string) []string {
	all := strings.Split(text, ",")
	for i := range all {
		all[i] = strings.TrimSpace(all[i])
	}
	return all
}

// nodeTarget returns the value of one side of a constraint.
func nodeTarget(target string, n *api.Node) (value string, ok bool) {
	name, ok := interpolated(target)
	if !ok {
		return target, true
	}
	switch name {
	case "node.unique.id":
		return n.ID, true
	case "node.unique.name":
		return n.Name, true
	case "node.datacenter":
		return n.Datacenter, true
	case "node.class":
		return n.NodeClass, true
	case "node.pool":
		return n.NodePool, true
	}
	if key, ok := strings.CutPrefix(name, "attr."); ok {
		value, ok = n.Attributes[key]
		return value, ok
	}
	if key, ok := strings.CutPrefix(name, "meta."); ok {
		value, ok = n.Meta[key]
		return value, ok
	}
	return "", false
}

// interpolated returns the name in "${name}".
func interpolated(target string) (name string, ok bool) {
	if name, ok = strings.CutPrefix(target, "${"); !ok {
		return "", false
	}
	return strings.TrimSuffix(name, "}"), true
}

// ordered reports whether an order is one that an operator permits.
func ordered(operand string, order int) bool {
	switch operand {
	case "<":
		return order < 0
	case "<=":
		return order <= 0
	case ">":
		return order > 0
	}
	return order >= 0
}

// compareTexts compares two values as whole numbers, else as numbers, else as texts.
func compareTexts(a, b string) int {
	if x, err := strconv.ParseInt(a, 10, 64); err == nil {
		if y, err := strconv.ParseInt(b, 10, 64); err == nil {
			return cmp.Compare(x, y)
		}
	}
	if x, err := strconv.ParseFloat(a, 64); err == nil {
		if y, err := strconv.ParseFloat(b, 64); err == nil {
			return cmp.Compare(x, y)
		}
	}
	return cmp.Compare(a, b)
}

// meetsDevice reports whether a device group meets a constraint of a request for certain.
func meetsDevice(c *api.Constraint, g *api.NodeDeviceResource) (bool, error) {
	left, leftOK := deviceTarget(c.LTarget, g)
	right, rightOK := deviceTarget(c.RTarget, g)
	switch c.Operand {
	case api.ConstraintDistinctHosts:
		return true, nil
	case "!=", "not":
		if leftOK != rightOK {
			return true, nil
		}
		order, ok := left.compare(right)
		return leftOK && ok && order != 0, nil
	case "=", "==", "is", "<", "<=", ">", ">=":
		order, ok := left.compare(right)
		if !leftOK || !rightOK || !ok {
			return false, nil
		}
		if strings.ContainsAny(c.Operand, "<>") {
			return ordered(c.Operand, order), nil
		}
		return order == 0, nil
	}
	return meets(c.Operand, left.text, right.text, leftOK, rightOK)
}

// quantity is a text, or a number in the base unit of its kind.
type quantity struct {
	text   string
	number float64
	kind   string // of the unit; "" = none
	isText bool
}

func (q quantity) compare(o quantity) (order int, ok bool) {
	switch {
	case q.isText != o.isText || q.kind != o.kind:
		return 0, false
	case q.isText:
		return cmp.Compare(q.text, o.text), true
	}
	return cmp.Compare(q.number, o.number), true
}

func deviceTarget(target string, g *api.NodeDeviceResource) (quantity, bool) {
	text := func(s string) (quantity, bool) { return quantity{text: s, isText: true}, true }
	name, ok := interpolated(target)
	if !ok {
		return parseQuantity(target), true
	}
	switch name {
	case "device.model":
		return text(g.Name)
	case "device.vendor":
		return text(g.Vendor)
	case "device.type":
		return text(g.Type)
	case "device.ids":
		var ids []string
		for _, i := range g.Instances {
			ids = append(ids, i.ID)
		}
		return text(strings.Join(ids, ","))
	}
	key, ok := strings.CutPrefix(name, "device.attr.")
	a := g.Attributes[key]
	if !ok || a == nil {
		return quantity{}, false
	}
	switch {
	case a.StringVal != nil:
		return text(*a.StringVal)
	case a.IntVal != nil:
		return inUnit(float64(*a.IntVal), a.Unit, strconv.FormatInt(*a.IntVal, 10)), true
	case a.FloatVal != nil:
		return inUnit(*a.FloatVal, a.Unit, a.String()), true
	}
	return text(a.String())
}

var number = regexp.MustCompile(`^(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)$`)

// parseQuantity reads a value of a constraint: "40 GiB", "8", "Hopper".
func parseQuantity(s string) quantity {
	if m := number.FindStringSubmatch(s); m != nil {
		if _, known := units[m[2]]; known {
			if n, err := strconv.ParseFloat(m[1], 64); err == nil {
				return inUnit(n, m[2], s)
			}
		}
	}
	return quantity{text: s, isText: true}
}

func inUnit(n float64, unit, text string) quantity {
	u, ok := units[unit]
	if !ok {
		u = scale{unit, 1}
	}
	return quantity{text: text, number: n * u.factor, kind: u.kind}
}

type scale struct {
	kind   string
	factor float64
}

// units are those of Nomad's attributes.
var units = map[string]scale{
	"": {"", 1}, "mW": {"W", 1e-3}, "W": {"W", 1}, "kW": {"W", 1e3}, "MW": {"W", 1e6}, "GW": {"W", 1e9}, "MHz": {"Hz", 1e6}, "GHz": {"Hz", 1e9},
	"kB": {"B", 1e3}, "MB": {"B", 1e6}, "GB": {"B", 1e9}, "TB": {"B", 1e12}, "PB": {"B", 1e15}, "EB": {"B", 1e18},
	"KiB": {"B", 1 << 10}, "MiB": {"B", 1 << 20}, "GiB": {"B", 1 << 30}, "TiB": {"B", 1 << 40}, "PiB": {"B", 1 << 50}, "EiB": {"B", 1 << 60},
	"kB/s": {"B/s", 1e3}, "MB/s": {"B/s", 1e6}, "GB/s": {"B/s", 1e9}, "TB/s": {"B/s", 1e12},
	"KiB/s": {"B/s", 1 << 10}, "MiB/s": {"B/s", 1 << 20}, "GiB/s": {"B/s", 1 << 30}, "TiB/s": {"B/s", 1 << 40},
}

var (
	versionText    = regexp.MustCompile(`^v?([0-9]+(?:\.[0-9]+)*)(?:-([0-9A-Za-z.~-]+))?(?:\+[0-9A-Za-z.~-]+)?$`)
	constraintText = regexp.MustCompile(`^(=|!=|>|<|>=|<=|~>)?\s*(\S+)$`)
)

// version is a version of software: numbers, and what is before its release.
type version struct {
	numbers []int64
	pre     string
}

func parseVersion(text string) (v version, ok bool) {
	m := versionText.FindStringSubmatch(strings.TrimSpace(text))
	if m == nil {
		return v, false
	}
	for _, n := range strings.Split(m[1], ".") {
		i, err := strconv.ParseInt(n, 10, 64)
		if err != nil {
			return v, false
		}
		v.numbers = append(v.numbers, i)
	}
	v.pre = m[2]
	return v, true
}

// at returns one of the numbers; those that are missing are 0.
func (v version) at(i int) int64 {
	if i < len(v.numbers) {
		return v.numbers[i]
	}
	return 0
}

func (v version) compareNumbers(o version, n int) int {
	for i := range n {
		if order := cmp.Compare(v.at(i), o.at(i)); order != 0 {
			return order
		}
	}
	return 0
}

// compare reports false for two versions before the same release: this program does not decide which is first.
func (v version) compare(o version) (order int, ok bool) {
	order = v.compareNumbers(o, max(len(v.numbers), len(o.numbers)))
	switch {
	case order != 0 || v.pre == o.pre:
		return order, true
	case v.pre == "":
		return 1, true
	case o.pre == "":
		return -1, true
	}
	return 0, false
}

// meetsVersion reports whether a version meets all constraints of a list for certain, such as ">= 1.2, < 2". With semver a version before a release is
// ordered like any other; else it meets only a constraint of its own release.
func meetsVersion(text, constraints string, semver bool) bool {
	v, ok := parseVersion(text)
	if !ok {
		return false
	}
	for _, one := range list(constraints) {
		m := constraintText.FindStringSubmatch(one)
		if m == nil {
			return false
		}
		c, ok := parseVersion(m[2])
		if !ok || !meetsOne(v, c, m[1], semver) {
			return false
		}
	}
	return true
}

func meetsOne(v, c version, operand string, semver bool) bool {
	order, ok := v.compare(c)
	switch {
	case !ok:
		return false
	case operand == "" || operand == "=":
		return order == 0
	case operand == "!=":
		return order != 0
	case !semver && v.pre != "" && (c.pre == "" || v.compareNumbers(c, max(len(v.numbers), len(c.numbers))) != 0):
		return false
	case operand == "~>":
		return !semver && c.pre == "" && order >= 0 && v.compareNumbers(c, len(c.numbers)-1) == 0
	}
	return ordered(operand, order)
}
