package simdriver

import (
	"embed"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

//go:embed machines/*.conf
var machines embed.FS

// conf is the text of a machine.conf, edited line by line so that comments stay.
type conf struct{ lines []string }

// section is a run of lines: head is "gpu 3", lines[from] its [head] line.
type section struct {
	head     string
	from, to int
}

func parseConf(text string) *conf {
	return &conf{lines: strings.Split(strings.TrimRight(text, "\n"), "\n")}
}

func (c *conf) String() string { return strings.Join(c.lines, "\n") + "\n" }

func bare(line string) string {
	for i := range line {
		if line[i] == '#' && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t') {
			line = line[:i]
			break
		}
	}
	return strings.TrimSpace(line)
}

func (c *conf) sections() []section {
	var all []section
	for i, line := range c.lines {
		line = bare(line)
		if strings.HasPrefix(line, "[") {
			all = append(all, section{head: strings.Trim(line, "[]"), from: i})
		}
		if len(all) > 0 {
			all[len(all)-1].to = i + 1
		}
	}
	return all
}

func (c *conf) section(head string) (section, bool) {
	all := c.sections()
	i := slices.IndexFunc(all, func(s section) bool { return s.head == head })
	if i < 0 {
		return section{}, false
	}
	return all[i], true
}

// pair splits "key = value"; ok is false for any other line.
func pair(line string) (key, value string, ok bool) {
	key, value, ok = strings.Cut(bare(line), "=")
	return strings.TrimSpace(key), strings.TrimSpace(value), ok
}

// get is the last value of a key in a section.
func (c *conf) get(head, key string) (string, bool) {
	values := c.all(head, key)
	if len(values) == 0 {
		return "", false
	}
	return values[len(values)-1], true
}

func (c *conf) all(head, key string) []string {
	s, ok := c.section(head)
	if !ok {
		return nil
	}
	var values []string
	for _, line := range c.lines[s.from:s.to] {
		if k, v, ok := pair(line); ok && k == key {
			values = append(values, v)
		}
	}
	return values
}

// gpuGet is a GPU's value, its own or the default; "" when neither is given.
func (c *conf) gpuGet(slot int, key string) string {
	if v, ok := c.get(gpuHead(slot), key); ok {
		return v
	}
	v, _ := c.get("defaults", key)
	return v
}

// set gives a key one value: the lines that had it go.
func (c *conf) set(head, key, value string) error { return c.setAll(head, key, []string{value}) }

// setAll replaces every line of a key in a section, at the place of the first, or else after the last pair.
func (c *conf) setAll(head, key string, values []string) error {
	s, ok := c.section(head)
	if !ok {
		return fmt.Errorf("no section [%s]", head)
	}
	var body []string
	at, found := 0, false
	for _, line := range c.lines[s.from+1 : s.to] {
		k, _, isPair := pair(line)
		if isPair && k == key {
			if !found {
				at, found = len(body), true
			}
			continue
		}
		if body = append(body, line); isPair && !found {
			at = len(body)
		}
	}
	added := make([]string, 0, len(values))
	for _, v := range values {
		added = append(added, key+" = "+v)
	}
	c.lines = slices.Concat(c.lines[:s.from+1], body[:at], added, body[at:], c.lines[s.to:])
	return nil
}

func gpuHead(slot int) string { return "gpu " + strconv.Itoa(slot) }

// slots are the numbers of the [gpu N] sections, in the file's order, which is the index order.
func (c *conf) slots() []int {
	var slots []int
	for _, s := range c.sections() {
		if n, ok := strings.CutPrefix(s.head, "gpu "); ok {
			if slot, err := strconv.Atoi(strings.TrimSpace(n)); err == nil {
				slots = append(slots, slot)
			}
		}
	}
	return slots
}

// addGPU opens a section behind the last GPU's, before what refers to GPUs.
func (c *conf) addGPU(slot int, keys []string) {
	at := len(c.lines)
	for _, s := range c.sections() {
		if s.head == "links" {
			at = s.from
		}
		if strings.HasPrefix(s.head, "gpu ") {
			at = s.to
		}
	}
	block := append([]string{"", "[" + gpuHead(slot) + "]"}, keys...)
	c.lines = slices.Insert(c.lines, at, append(block, "")...)
}

func (c *conf) removeGPU(slot int) bool {
	s, ok := c.section(gpuHead(slot))
	if ok {
		c.lines = slices.Delete(c.lines, s.from, s.to)
	}
	return ok
}

var keyLine = regexp.MustCompile(`(?m)^KEY\((\w+), \w+\)$`)

// checkKey refuses a key that is not in the library's list of keys of a GPU.
func checkKey(key string) error {
	if strings.HasPrefix(key, "field.") || key == "unsupported" || key == "process" {
		return nil
	}
	text, err := sources.ReadFile("lib/keys.def")
	if err != nil {
		return err
	}
	for _, m := range keyLine.FindAllSubmatch(text, -1) {
		if string(m[1]) == key {
			return nil
		}
	}
	return fmt.Errorf("no GPU key %q", key)
}
