package policy

import (
	"errors"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config/document"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// The words of the key "injection", in the order of inventory.Injection.Name.
const (
	injectVariables = "variables"
	injectDevices   = "devices"
	injectCDI       = "cdi"
	injectLibraries = "libraries"
)

// InjectionWords are those that ParseInjection accepts.
func InjectionWords() []string { return injectionWords }

var injectionWords = []string{injectVariables, injectDevices, injectCDI, injectLibraries}

// ParseInjection returns what a task under Nomad gets by these words; their order does not matter:
//
//   - variables: NVIDIA_VISIBLE_DEVICES, on which Nomad's docker driver uses NVIDIA's container runtime, and device nodes.
//   - devices: device nodes, without that variable.
//   - cdi: names of CDI devices, which the job passes to its driver; alone or beside one of the others.
//   - libraries: the driver's files as mounts; beside devices.
//
// The error is the remedy.
func ParseInjection(words []string) (inventory.Injection, error) {
	var known []string
	for _, word := range injectionWords {
		if slices.Contains(words, word) {
			known = append(known, word)
		}
	}
	has := func(word string) bool { return slices.Contains(known, word) }
	switch {
	case len(words) == 0:
		return inventory.Injection{}, errors.New("an empty list gives a task nothing: leave the key out")
	case slices.ContainsFunc(words, func(word string) bool { return !has(word) }):
		return inventory.Injection{}, errors.New("want " + document.Choice(injectionWords) + ", or several of them")
	case has(injectVariables) && has(injectDevices):
		return inventory.Injection{}, errors.New("variables has the device nodes, too, and selects NVIDIA's container runtime: want one of variables and devices")
	case has(injectLibraries) && !has(injectDevices):
		return inventory.Injection{}, errors.New("libraries belongs to devices, because NVIDIA's container runtime and CDI have the driver's files: want devices beside it")
	}
	i := inventory.Injection{
		Name: strings.Join(known, ", "), Runtime: has(injectVariables), Nodes: has(injectVariables) || has(injectDevices), Libraries: has(injectLibraries),
	}
	if has(injectCDI) {
		i.CDI = inventory.CDIRequired
	}
	return i, nil
}

// readInjection reads how tasks under Nomad get the devices of a rule; nil if the rule does not specify it, if it is a
// problem, or for the agent of Kubernetes, where it has no effect.
func (c *compiler) readInjection(f fields) *inventory.Injection {
	v := f.At("injection")
	if !v.Given() {
		return nil
	}
	if f.At("for").Text() == string(Kubernetes) {
		v.Failf("applies to tasks under Nomad: remove it, or for: kubernetes")
		return nil
	}
	before, items := c.problems(), []value{v}
	if !v.IsScalar() {
		items = v.Items()
	}
	var words []string
	for _, item := range items {
		if word, ok := item.OneOf(injectionWords...); ok {
			words = append(words, word)
		}
	}
	if c.problems() > before {
		return nil
	}
	i, err := ParseInjection(words)
	if err != nil {
		v.Failf("%s", err)
		return nil
	}
	if c.to != Nomad {
		return nil
	}
	return &i
}
