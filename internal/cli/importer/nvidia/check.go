package nvidia

import (
	"errors"
	"net"
	"regexp"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// resultName stands for the path of the result while it is checked.
const resultName = "result.yaml"

// place is the place of a key in the result.
var place = regexp.MustCompile(`^` + regexp.QuoteMeta(resultName) + `(:\d+)?: `)

// check reads the result as k8s-gpu does, and returns every problem with its place in the input.
func (b *builder) check(text []byte) (problems []string) {
	flags := config.NewFlags(config.KubernetesSpecs())
	_ = flags[config.FlagConfigFile].Set(resultName) // it accepts any text
	for _, o := range b.flags {
		if f := flags[o.flag]; f != nil {
			_ = f.Set(o.text)
		}
	}
	_, err := config.ReadKubernetes(flags, config.Environment{
		LookupEnv:    func(name string) (string, bool) { v, ok := b.env[name]; return v, ok },
		CheckAddress: func(address string) error { _, err := net.ResolveTCPAddr("tcp", address); return err },
		ReadFile:     func(string) ([]byte, error) { return text, nil },
	})
	for _, e := range importer.Split(err) {
		problems = append(problems, b.describe(e))
	}
	return problems
}

// describe is a problem with its place in the input.
func (b *builder) describe(err error) string {
	s, ok := errors.AsType[*setting.Error](err)
	if !ok {
		return b.config.where + ": " + place.ReplaceAllString(err.Error(), "")
	}
	e := *s
	e.Key = place.ReplaceAllString(e.Key, "")
	if i := slices.IndexFunc(b.flags, func(o option) bool { return "--"+o.flag == e.Key }); i >= 0 {
		e.Key = b.flags[i].where
		return e.Error()
	}
	for key := e.Key; key != ""; key = parentOf(key) {
		if where := b.places[key]; where != "" {
			e.Key = where + strings.TrimPrefix(e.Key, key)
			return e.Error()
		}
	}
	e.Key = b.config.where + ": " + e.Key
	return e.Error()
}

// parentOf is the key of what has a key: "a.b[0]" for "a.b[0].c".
func parentOf(key string) string {
	return key[:max(strings.LastIndexAny(key, ".["), 0)]
}
