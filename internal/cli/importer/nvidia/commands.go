package nvidia

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/tandem-gpu/tandem/internal/cli/importer"
)

// isCommands reports whether a text begins like a command line.
func isCommands(text []byte) bool {
	for _, c := range commandsOf(text) {
		return len(c.words) > 0 && (isProgram(c.words[0]) || strings.HasPrefix(c.words[0], "-") || assignment.MatchString(c.words[0]))
	}
	return false
}

func isProgram(word string) bool {
	return slices.Contains([]string{"helm", "docker", "podman", "nvidia-device-plugin", "k8s-device-plugin"}, path.Base(word))
}

// assignment is a variable before a command.
var assignment = regexp.MustCompile(`^[A-Z][A-Z0-9_]*=`)

// command is a command line of a text.
type command struct {
	line  int
	words []string
}

// commandsOf splits a text into commands. A prompt and sudo are left out, comments are no commands.
func commandsOf(text []byte) (commands []command) {
	lines := strings.Split(string(text), "\n")
	for i := 0; i < len(lines); i++ {
		c := command{line: i + 1}
		line := lines[i]
		for strings.HasSuffix(strings.TrimRight(line, " \t\r"), `\`) && i+1 < len(lines) {
			i++
			line = strings.TrimSuffix(strings.TrimRight(line, " \t\r"), `\`) + " " + lines[i]
		}
		if c.words = shellWords(line); len(c.words) > 0 && (c.words[0] == "$" || c.words[0] == "sudo") {
			c.words = c.words[1:]
		}
		if len(c.words) > 0 && !strings.HasPrefix(c.words[0], "#") {
			commands = append(commands, c)
		}
	}
	return commands
}

// shellWords splits a line into words, with quotes as in a shell. Nothing is expanded.
func shellWords(line string) (words []string) {
	var word strings.Builder
	quote, open := rune(0), false
	for i, r := range line {
		switch {
		case quote != 0 && r == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(r)
		case r == '\'' || r == '"':
			quote, open = r, true
		case r == ' ' || r == '\t' || r == '\n' || r == '\r':
			if open {
				words = append(words, word.String())
				word.Reset()
				open = false
			}
		case r == '\\' && i+1 < len(line) && !strings.ContainsRune(`.,`, rune(line[i+1])): // Helm reads "\." and "\,"
		default:
			word.WriteRune(r)
			open = true
		}
	}
	if open {
		words = append(words, word.String())
	}
	return words
}

// readCommands reads command lines that install or start the plugin; one without a program is a list of its flags.
func (s *source) readCommands(in Input) error {
	s.kind = "command line of NVIDIA's k8s-device-plugin"
	found := false
	for _, c := range commandsOf(in.Text) {
		where := fmt.Sprintf("%s:%d:", s.path, c.line)
		switch program := path.Base(c.words[0]); {
		case program == "helm" && len(c.words) > 1 && (c.words[1] == "install" || c.words[1] == "upgrade" || c.words[1] == "template"):
			if err := s.readHelm(c, in); err != nil {
				return err
			}
		case program == "helm":
			continue // repo add, repo update, search
		case program == "docker" || program == "podman":
			s.readRun(c.words, where)
		case isProgram(program) || strings.HasPrefix(c.words[0], "-") || assignment.MatchString(c.words[0]):
			s.readProcess(c.words, where)
		default:
			return fmt.Errorf("%s command %s: want helm install, helm upgrade, docker run, or nvidia-device-plugin with its flags", where, program)
		}
		found = true
	}
	if !found {
		return fmt.Errorf("%s: no command that installs or starts the plugin", s.path)
	}
	return nil
}

// readProcess reads variables, the program and its flags.
func (s *source) readProcess(words []string, where string) {
	for len(words) > 0 && assignment.MatchString(words[0]) {
		name, value, _ := strings.Cut(words[0], "=")
		s.readVariable(name, value, where+" "+name)
		words = words[1:]
	}
	s.readFlags(words, where)
}

// readRun reads "docker run": variables by -e or --env, and what follows the image.
func (s *source) readRun(words []string, where string) {
	for i, w := range words {
		name, isEnv := strings.CutPrefix(w, "--env=")
		if (w == "-e" || w == "--env") && i+1 < len(words) {
			name, isEnv = words[i+1], true
		}
		if key, value, ok := strings.Cut(name, "="); isEnv && ok {
			s.readVariable(key, value, where+" "+key)
		}
		if strings.Contains(w, "device-plugin") && !strings.HasPrefix(w, "-") && !strings.Contains(w, ":/") {
			s.readFlags(words[i+1:], where)
			return
		}
	}
}

// readHelm reads "helm install" or "helm upgrade": the values of its files, then those of --set.
func (s *source) readHelm(c command, in Input) error {
	root := &node{Kind: yaml.MappingNode, Tag: "!!map", Line: c.line}
	operator := false
	for _, w := range c.words[2:] {
		operator = operator || strings.Contains(path.Base(w), "gpu-operator") && strings.Contains(w, "/") && !strings.HasPrefix(w, "-")
	}
	sets, err := helmSets(c)
	if err != nil {
		return fmt.Errorf("%s:%d: %w", s.path, c.line, err)
	}
	for _, set := range sets {
		switch set.flag {
		case "-f", "--values":
			err = s.mergeFile(root, set.text, in)
		case "--set-file":
			err = s.setFile(root, set, c.line, in)
		default:
			setValue(root, set.key, set.text, c.line, set.flag == "--set-string")
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %s %s: %w", s.path, c.line, set.flag, set.text, err)
		}
	}
	if operator || isOperator(root) {
		s.kind = "helm command of NVIDIA's GPU operator"
		s.readOperator(root, "")
		return nil
	}
	s.kind = "helm command of NVIDIA's k8s-device-plugin"
	s.readValues(root)
	return nil
}

// mergeFile adds the values of a file.
func (s *source) mergeFile(root *node, file string, in Input) error {
	text, err := readFile(in, file)
	if err != nil {
		return err
	}
	docs, err := parse(file, text)
	if err != nil || len(docs) == 0 {
		return err
	}
	for _, key := range docs[0].keys() {
		if v := docs[0].get(key); v != nil {
			root.put(key, (*yaml.Node)(v))
		}
	}
	return nil
}

func readFile(in Input, file string) ([]byte, error) {
	if in.ReadFile == nil {
		return nil, fmt.Errorf("%s can't be read here", file)
	}
	return in.ReadFile(file)
}

// fileTag marks the text of a file that --set-file named.
const fileTag = "!file"

func (s *source) setFile(root *node, set helmSet, line int, in Input) error {
	text, err := readFile(in, set.text)
	if err != nil {
		return err
	}
	value := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: string(text), Line: line, Anchor: fileTag + set.text}
	root.put(set.key, value)
	return nil
}

// fromFile adds a configuration that --set-file named; false if it is from elsewhere.
func (s *source) fromFile(name string, v *node) bool {
	file, ok := strings.CutPrefix(v.Anchor, fileTag)
	if !ok {
		return false
	}
	docs, err := parse(file, []byte(v.Value))
	if err != nil || len(docs) > 1 {
		s.note(importer.Differs, file, "left out: it is no YAML document", "")
		return true
	}
	f := fileText{name: name, where: file}
	if len(docs) == 1 {
		f.root = docs[0]
	}
	s.configs = append(s.configs, f)
	return true
}
