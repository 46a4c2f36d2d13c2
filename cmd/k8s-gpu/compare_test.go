package main

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

func TestCompare(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*settings)
		want   agent.Change
	}{
		"nothing":                    {func(*settings) {}, agent.Unchanged},
		"MIG strategy":               {func(s *settings) { s.Core.MIG = inventory.MIGMixed }, agent.PolicyChanged},
		"kubelet socket":             {func(s *settings) { s.KubeletSocket = "other" }, agent.RunChanged},
		"another driver root":        {func(s *settings) { s.Core.Roots.Driver = "/run/nvidia/driver" }, agent.LibraryChanged},
		"another way to the library": {func(s *settings) { s.FallbackDriver = true }, agent.LibraryChanged},
		"other device nodes":         {func(s *settings) { s.Core.Roots.Dev = "/run/nvidia/driver" }, agent.RunChanged},
	} {
		was, is := settings{Core: core.DefaultConfig()}, settings{Core: core.DefaultConfig()}
		tc.change(&is)
		if got, _ := compare(was, is); got != tc.want {
			t.Errorf("%s: change %d, want %d", name, got, tc.want)
		}
	}
}
