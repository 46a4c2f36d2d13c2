package clientconfig

import (
	"bytes"
	"fmt"
	"unicode"

	"github.com/hashicorp/hcl/hcl/parser"
	"github.com/hashicorp/hcl/hcl/scanner"
	"github.com/hashicorp/hcl/hcl/token"
	jsonscanner "github.com/hashicorp/hcl/json/scanner"
	jsontoken "github.com/hashicorp/hcl/json/token"
)

// maxDepth is the deepest nesting of blocks and lists in a text. A Nomad client's configuration needs fewer than ten
// levels.
const maxDepth = 100

// checkDepth returns an error if a text is nested too deep. The parser calls itself for each level, and no program
// survives the overflow of its stack.
func checkDepth(text []byte) error {
	nextBracket := hclBrackets(text)
	if bytes.HasPrefix(bytes.TrimLeftFunc(text, unicode.IsSpace), []byte("{")) { // as the library tells JSON from HCL
		nextBracket = jsonBrackets(text)
	}
	for depth := 0; ; {
		step, line := nextBracket()
		if step == 0 {
			return nil
		}
		if depth += step; depth > maxDepth {
			cause := fmt.Errorf("blocks and lists are nested deeper than %d levels", maxDepth)
			return &parser.PosError{Pos: token.Pos{Line: line}, Err: cause}
		}
	}
}

// hclBrackets returns a function that returns the next bracket of a text in HCL and its line: 1 if it opens, -1 if it
// closes, 0 at the end.
func hclBrackets(text []byte) func() (step, line int) {
	s := scanner.New(text)
	s.Error = func(token.Pos, string) {} // the parser reports it
	return func() (step, line int) {
		for {
			switch t := s.Scan(); t.Type {
			case token.LBRACE, token.LBRACK:
				return 1, t.Pos.Line
			case token.RBRACE, token.RBRACK:
				return -1, t.Pos.Line
			case token.EOF:
				return 0, 0
			default:
			}
		}
	}
}

// jsonBrackets is hclBrackets for JSON.
func jsonBrackets(text []byte) func() (step, line int) {
	s := jsonscanner.New(text)
	s.Error = func(jsontoken.Pos, string) {}
	return func() (step, line int) {
		for {
			switch t := s.Scan(); t.Type {
			case jsontoken.LBRACE, jsontoken.LBRACK:
				return 1, t.Pos.Line
			case jsontoken.RBRACE, jsontoken.RBRACK:
				return -1, t.Pos.Line
			case jsontoken.EOF:
				return 0, 0
			default:
			}
		}
	}
}
