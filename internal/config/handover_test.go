package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/check"
)

// The hand-over is off by default. It takes the name of the Node, and two conditions of different types.
func TestHandOver(t *testing.T) {
	read := func(variables map[string]string) (Kubernetes, error) {
		return resolveOne(t, NewFlags(KubernetesSpecs()), variables, nil)
	}
	s, err := read(nil)
	if check.NoError(t, err); s.HandOver.Enabled || s.CheckNode() != nil || len(s.HandOver.summary()) > 0 {
		t.Errorf("by default %+v", s.HandOver)
	}
	s, err = read(map[string]string{"HAND_OVER": "true", "HAND_OVER_SECOND_CONDITION": "GPUMissing"})
	if want := (HandOver{true, DefaultCondition, "GPUMissing", true}); err != nil || s.HandOver != want || s.checkHandOver() != nil {
		t.Errorf("%+v, %v; want %+v", s.HandOver, err, want)
	}
	if missing := s.CheckNode(); missing == nil || !strings.Contains(missing.Error(), "--hand-over takes the name of this node's Node object") {
		t.Errorf("without a node: %v", missing)
	}
	if lines := s.Summary(); !slices.Contains(lines, "hand-over: condition TandemGPUsHealthy and condition GPUMissing of the Node, events of pods") {
		t.Errorf("%q", lines)
	}
	s.HandOver.Second = DefaultCondition
	if err := s.checkHandOver(); err == nil || !strings.Contains(err.Error(), `--hand-over-second-condition = "TandemGPUsHealthy"`) {
		t.Errorf("two conditions of one type: %v", err)
	}
}
