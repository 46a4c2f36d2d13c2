package config

import (
	"errors"
	"slices"

	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// HandOver is how the faults of GPUs are handed over to other programs: in the Node object and in events of pods.
type HandOver struct {
	Enabled   bool
	Condition string // type of the Node's condition
	Second    string // type of another one with the same meaning, which a repair system reads; "" = none
	Events    bool   // pods that have a faulty GPU get an event
}

const (
	flagHandOver        = "hand-over"
	flagSecondCondition = "hand-over-second-condition"

	// DefaultCondition is the type of the Node's condition.
	DefaultCondition = "TandemGPUsHealthy"
)

// kubeletConditions are the types that the kubelet writes.
var kubeletConditions = []string{"Ready", "MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable"}

// handOverOptions are the options of HandOver.
func handOverOptions(o *HandOver) []Spec {
	return []Spec{
		{Flag: flagHandOver, Key: "handOver.enabled", Default: "false",
			Usage:   "report GPUs that need a repair to other programs: by a condition and the annotation tandem.dev/gpu-faults of this node's Node object, and by events of pods",
			Note:    "See [operations](operations.md#hand-over). Takes `node-name`, the rights of deploy/hand-over, and its admission policy, without which nothing is written",
			binding: boolean(&o.Enabled)},
		{Flag: "hand-over-condition", Key: "handOver.condition", Default: DefaultCondition,
			Usage:   "type of the Node's condition: False while a GPU needs a repair, if the type ends with Healthy or Ready, else True",
			Note:    "The admission policy names it, too",
			binding: conditionType(&o.Condition, DefaultCondition)},
		{Flag: flagSecondCondition, Key: "handOver.secondCondition",
			Usage:   "type of another condition with the same meaning, which a repair system reads, such as AcceleratedHardwareReady or GPUMissing; empty: none",
			Note:    "The admission policy names it, too. No other program may write it",
			binding: orEmpty(&o.Second, conditionType(&o.Second, "AcceleratedHardwareReady"))},
		{Flag: "hand-over-events", Key: "handOver.events", Default: "true",
			Usage:   "each pod that has a GPU which needs a repair gets an event, one for each fault",
			binding: boolean(&o.Events)},
	}
}

// conditionType sets the type of a condition of a Node.
func conditionType(field *string, example string) binding {
	b := matching(field, schema.Match(labelForm, "a type"), "want the type of a condition such as "+example)
	return custom(b.Type, func(v Value) error {
		if slices.Contains(kubeletConditions, v.Text) {
			return errors.New("the kubelet writes this condition: want a type such as " + example)
		}
		return b.set(v)
	})
}

// checkHandOver reports what the hand-over lacks.
func (s Kubernetes) checkHandOver() error {
	if o := s.HandOver; o.Second != "" && o.Second == o.Condition {
		return &setting.Error{Key: "--" + flagSecondCondition, Value: o.Second, Remedy: "is the condition that there is already: want another type, or nothing"}
	}
	return nil
}

// summary is a line about the hand-over.
func (o HandOver) summary() []string {
	if !o.Enabled {
		return nil
	}
	line := "hand-over: condition " + o.Condition
	if o.Second != "" {
		line += " and condition " + o.Second
	}
	if line += " of the Node"; o.Events {
		line += ", events of pods"
	}
	return []string{line}
}
