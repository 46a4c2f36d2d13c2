package config

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/util/setting"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/goldenfile"
)

const repository = "../.."

// docs/tandem.schema.json is the schema. -update writes it.
func TestSchemaFile(t *testing.T) {
	var text bytes.Buffer
	check.NoError(t, WriteFileSchema(&text))
	goldenfile.Compare(t, repository+"/docs/tandem.schema.json", text.String())
}

// fileSchema is the schema, compiled by a library that checks it against the draft's meta-schema.
func fileSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	var text bytes.Buffer
	check.NoError(t, WriteFileSchema(&text))
	document, err := jsonschema.UnmarshalJSON(&text)
	check.NoError(t, err)
	c := jsonschema.NewCompiler()
	check.NoError(t, c.AddResource("tandem.schema.json", document))
	s, err := c.Compile("tandem.schema.json")
	check.NoError(t, err)
	return s
}

// jsonValue is a file's value as a JSON Schema library takes it.
func jsonValue(text string) (any, error) {
	var v any
	d := yaml.NewDecoder(strings.NewReader(text))
	if err := d.Decode(&v); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, errors.New("several documents")
	}
	return normal(v), nil
}

func normal(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for key := range v {
			v[key] = normal(v[key])
		}
		return v
	case map[any]any:
		object := map[string]any{}
		for key, value := range v {
			object[fmt.Sprint(key)] = normal(value)
		}
		return object
	case []any:
		for i := range v {
			v[i] = normal(v[i])
		}
		return v
	}
	return v
}

// beyond are the remedies of problems that a schema can't express, or not without repeating the rules of the reader: what depends on
// another key, on another rule, or on the numbers in a text.
var beyond = regexp.MustCompile(strings.Join([]string{
	`has no effect: `, `the first rule that selects a device counts`, `^would be `, `already shared by`, `^unknown resource: `, `^given twice$`,
	`^want no more than max`, `^applies to GPUs`, `^MPS shares full GPUs only`, `^libraries belongs to`, `^variables has the device nodes`,
	`^a rule that shares without a name`, `is too long a name`, `is given twice$`, `^want all, or a rename`, `^with api dra `, `^want a folder of its own`,
	`^has no effect without the switch`, `^limits are experimental`, `^time-slicing limits no memory by itself`, `^the driver limits no memory of MIG`, `^want a whole number of MiB`,
	`^want a time from`, `^want the absolute path`, `^the window ends when it begins`,
}, "|"))

// What k8s-gpu accepts fulfils the schema, and what it refuses for its structure does not: in every text of the repository's tests,
// documents and examples that is a configuration file.
func TestSchemaOfAllFiles(t *testing.T) {
	s := fileSchema(t)
	accepted, refused := 0, 0
	for text, at := range corpus(t) {
		_, err := parseFile("/c.yaml", []byte(text), policy.Kubernetes, fileKinds(true))
		if err == nil {
			_, err = resolve(NewFlags(KubernetesSpecs()), environment(nil), mustParse(t, text))
		}
		value, invalid := jsonValue(text)
		if invalid != nil {
			continue // no YAML to this library, or a key twice
		}
		problem := s.Validate(value)
		switch {
		case err == nil:
			if accepted++; problem != nil {
				t.Errorf("%s: %v\n%s", at, problem, text)
			}
		case structural(err):
			if refused++; problem == nil {
				t.Errorf("%s: the schema allows what is refused: %v\n%s", at, err, text)
			}
		}
	}
	t.Logf("%d accepted, %d refused for their structure", accepted, refused)
	if accepted < 80 || refused < 40 {
		t.Errorf("only %d accepted and %d refused files: is the search broken?", accepted, refused)
	}
}

func mustParse(t *testing.T, text string) File {
	t.Helper()
	f, err := parseFile("/c.yaml", []byte(text), policy.Kubernetes, fileKinds(true))
	check.NoError(t, err)
	return f
}

// structural reports whether a schema must find one of the problems.
func structural(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		return slices.ContainsFunc(joined.Unwrap(), structural)
	}
	problem, ok := errors.AsType[*setting.Error](err)
	return !ok || !beyond.MatchString(problem.Remedy)
}

// sectionKey begins a line of a configuration file.
var sectionKey = regexp.MustCompile(`(?m)^\{?"?(version|flags|health|imex|memoryLimits|policy|prove|reset|sharing|resources)"?: *`)

// ofFleet is a line of a configuration file of gpu-fleet, which has a section "policy", too.
var ofFleet = regexp.MustCompile(`(?m)^\{?clusters: *`)

// corpus are the configuration files in string constants of tests, in documents and in examples, each with its place.
func corpus(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	add := func(text, at string) {
		if sectionKey.MatchString(text) && !ofFleet.MatchString(text) && !strings.Contains(text, "%s") {
			found[text] = at
		}
	}
	check.NoError(t, filepath.WalkDir(repository, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == ".git" || d.Name() == "adr"):
			return filepath.SkipDir
		case strings.HasSuffix(path, "_test.go"):
			for _, text := range stringsOf(t, path) {
				add(text, path)
			}
		case strings.HasSuffix(path, ".md"):
			text, err := os.ReadFile(path)
			check.NoError(t, err)
			for _, block := range strings.Split(string(text), "```yaml\n")[1:] {
				block, _, _ = strings.Cut(block, "```")
				add(block, path)
			}
		}
		return nil
	}))
	for _, path := range []string{"deploy/policy/policy.yaml", "deploy/prove/policy.yaml", "deploy/reset/policy.yaml"} {
		example, err := os.ReadFile(repository + "/" + path)
		check.NoError(t, err)
		add(string(example), path)
	}
	incumbents, err := os.ReadFile("policy/testdata/nvidia.golden")
	check.NoError(t, err)
	for example := range strings.SplitSeq(strings.TrimPrefix(string(incumbents), "# "), "\n# ") {
		name, rest, _ := strings.Cut(example, "\n")
		file, _, _ := strings.Cut(rest, "=> ")
		add(file, name)
	}
	return found
}

// stringsOf are the string constants of a Go file, concatenated where all parts are constants of the file.
func stringsOf(t *testing.T, path string) (texts []string) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	check.NoError(t, err)
	constants := map[string]string{}
	var value func(ast.Expr) (string, bool)
	value = func(e ast.Expr) (string, bool) {
		switch e := e.(type) {
		case *ast.BasicLit:
			text, err := strconv.Unquote(e.Value)
			return text, err == nil && e.Kind == token.STRING
		case *ast.Ident:
			text, ok := constants[e.Name]
			return text, ok
		case *ast.BinaryExpr:
			left, ok1 := value(e.X)
			right, ok2 := value(e.Y)
			return left + right, ok1 && ok2 && e.Op == token.ADD
		}
		return "", false
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Names) == len(spec.Values) {
			for i, name := range spec.Names {
				if text, ok := value(spec.Values[i]); ok {
					constants[name.Name] = text
				}
			}
		}
		return true
	})
	ast.Inspect(file, func(n ast.Node) bool {
		e, ok := n.(ast.Expr)
		if !ok {
			return true
		}
		text, ok := value(e)
		if ok {
			texts = append(texts, text)
		}
		return !ok
	})
	return texts
}
