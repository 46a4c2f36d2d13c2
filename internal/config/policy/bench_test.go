package policy_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
)

// BenchmarkCompile reads a file of rules, from its text to the policy. A configuration is read at a start and at a
// HUP, so what counts is that a large one takes no more than it is larger.
func BenchmarkCompile(b *testing.B) {
	for _, rules := range []int{10, 1000, 5000} {
		b.Run(fmt.Sprintf("%d rules", rules), func(b *testing.B) {
			var text strings.Builder
			text.WriteString("policy:\n  rules:\n")
			for i := range rules {
				fmt.Fprintf(&text, "    - {select: {uuid: GPU-%d}, use: time-slicing, replicas: 4, name: pool-%d}\n", i, i)
			}
			text.WriteString("sharing:\n  timeSlicing:\n    resources:\n")
			for i := range rules {
				fmt.Fprintf(&text, "      - {name: mig-%d, replicas: 2}\n", i)
			}
			for b.Loop() {
				if _, err := config.ParseFile("/c.yaml", []byte(text.String()), policy.Nomad); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
