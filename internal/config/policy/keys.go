package policy

import (
	"github.com/tandem-gpu/tandem/internal/config/schema"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// Sections are the keys of a file that Compile reads, in the order of the documentation.
func Sections() []schema.Key {
	return []schema.Key{
		{Name: "policy", Type: schema.ObjectOf(policyKeys...), Usage: "which devices are offered, and how; an extension of NVIDIA's file"},
		{Name: "sharing", Type: schema.ObjectOf(sharingKeys...), Usage: "how the devices of a resource are shared, unless a rule decides"},
		{Name: "resources", Type: schema.ObjectOf(resourceKeys...), Usage: "names of resources; the first pattern that matches counts"},
		{Name: "prove", Type: schema.ObjectOf(proveKeys...), Usage: "a command that proves GPUs which no work has; without the section, none is proved"},
		{Name: "memoryLimits", Type: schema.ObjectOf(limitKeys...), Usage: "experimental: limits of the memory of shares, which the driver holds; without the section, no rule can have one"},
		{Name: "reset", Type: schema.ObjectOf(resetKeys...), Usage: "whether faulty GPUs that no work has are reset; without the section, none is but by a person"},
	}
}

var policyKeys = []schema.Key{
	{Name: "include", Type: schema.ListOf(selector, 1), Usage: "only devices that one of these selectors selects are offered; without the key, all"},
	{Name: "exclude", Type: schema.ListOf(selector, 0), Usage: "devices that one of these selectors selects are not offered"},
	{Name: "rules", Type: schema.ListOf(schema.Type{Kind: schema.Object, Keys: ruleKeys, Some: ruleEffects, Cases: ruleCases}, 0),
		Usage: "the first rule that selects a device applies to it"},
}

// selector is the type of a selector: all its keys must match.
var selector = schema.Type{Kind: schema.Object, Name: "selector", Keys: selectorKeys, Some: schema.Names(selectorKeys)}

var selectorKeys = []schema.Key{
	{Name: "uuid", Type: schema.OneOrMore(uuidType), Usage: "UUID of a GPU (`GPU-...`), or of one MIG instance (`MIG-...`)"},
	{Name: "pci", Type: schema.OneOrMore(schema.Match(`^([0-9A-Fa-f]+:)?0*[0-9A-Fa-f]{1,2}:0*[01]?[0-9A-Fa-f]\.0*[0-7]$`, "an address such as `0000:3b:00.0` or `3b:00.0`")),
		Usage: "PCI address of a GPU"},
	{Name: "index", Type: schema.OneOrMore(indexType), Usage: "number of a GPU when an agent first read it in this boot: `0`, `\"2-4\"`, `\"0:1\"` for the second instance of the first GPU"},
	{Name: "model", Type: schema.OneOrMore(patternType), Usage: "product name, with `*` for any text: `\"*H100*\"`"},
	{Name: "migProfile", Type: schema.OneOrMore(patternType), Usage: "profile of a MIG instance, with `*` for any text: `\"1g.*\"`"},
	{Name: "memory", Type: schema.Type{Kind: schema.Object, Keys: rangeKeys, Min: 1}, Usage: "memory of the device itself: `{min: 40GiB, max: 80GiB}`, or one of them"},
}

var rangeKeys = []schema.Key{
	{Name: "min", Type: sizeType, Usage: "at least so much"},
	{Name: "max", Type: sizeType, Usage: "at most so much"},
}

// uses are the values of "use", and strategies those of "migStrategy".
var (
	uses          = []string{useExclusive, useTimeSlicing, useMPS, useReserved}
	strategies    = []string{string(inventory.MIGNone), string(inventory.MIGSingle), string(inventory.MIGMixed)}
	orchestrators = []string{string(Nomad), string(Kubernetes)}
)

// ruleEffects are the keys of which a rule has at least one.
var ruleEffects = []string{"use", "for", "name", "migStrategy", "injection"}

var ruleKeys = []schema.Key{
	{Name: "select", Required: true, Type: selector, Usage: "the devices to which the rule applies"},
	{Name: "use", Type: schema.OneOf(uses...),
		Usage: "`exclusive`: one workload; `time-slicing`, `mps`: several; `reserved`: not offered. Without it the section `sharing` decides"},
	{Name: "replicas", Type: schema.Int(2, maxReplicas), Usage: "units of each device, for `time-slicing` and `mps` (at most 48), which require it"},
	{Name: "failRequestsGreaterThanOne", Default: "false", Type: strictBool,
		Usage: "a request for two units fails, because it would not give more of a GPU; for `time-slicing`. For `mps` it is always so"},
	{Name: "memory", Type: sizeType, Usage: "device memory of one client, for `mps`; of one share, for `time-slicing` with `limit`: a whole number of MiB"},
	{Name: "limit", Type: schema.OneOf(limitModes...),
		Usage: "experimental, for `time-slicing` on full GPUs: the driver refuses a share more than its `memory`, or an equal part without that key. `required`: a share takes no work while nothing can limit it; `best-effort`: it does"},
	{Name: "threads", Type: schema.Int(1, maxThreads), Usage: "percent of a GPU's threads for one client, for `mps`"},
	{Name: "migStrategy", Type: schema.OneOf(strategies...), Usage: "MIG strategy of the GPUs that the rule selects; without it that of the agent"},
	{Name: "name", Type: poolType, Usage: "the pool: `nvidia.com/<name>`, and the name of the group on Nomad. Without it the default, with `.shared` or `.mps` if shared"},
	{Name: "injection", Type: schema.OneOrMore(schema.OneOf(injectionWords...)),
		Usage: "how tasks get the devices on Nomad; without it as in the plugin block. `k8s-gpu` checks the key and ignores it"},
	{Name: "for", Type: schema.OneOf(orchestrators...), Usage: "the agent of the other orchestrator does not offer these devices"},
}

// ruleCases are the conditions of readUse and readReserve.
var ruleCases = []schema.Case{
	{Key: "use", Values: []string{useMPS}, Then: []schema.Key{
		{Name: "replicas", Required: true, Type: schema.Int(2, maxClients)}, {Name: "failRequestsGreaterThanOne", Type: schema.OneOf("true")},
	}},
	{Key: "use", Values: []string{useTimeSlicing}, Then: []schema.Key{
		{Name: "replicas", Required: true, Type: schema.Int(2, maxReplicas)}, {Name: "threads", Type: schema.Absent},
	}},
	{Key: "use", Values: []string{useMPS}, Then: absent("limit")},
	{Key: "use", Values: []string{useExclusive, useReserved, ""}, Then: absent("replicas", "failRequestsGreaterThanOne", "memory", "threads", "limit")},
	{Key: "use", Values: []string{useReserved}, Then: absent("name", "migStrategy", "for", "injection")},
	{Key: "for", Values: []string{string(Kubernetes)}, Then: absent("injection")},
}

func absent(names ...string) (keys []schema.Key) {
	for _, name := range names {
		keys = append(keys, schema.Key{Name: name, Type: schema.Absent})
	}
	return keys
}

var sharingKeys = []schema.Key{
	{Name: "timeSlicing", Type: schema.ObjectOf(modeKeys(inventory.TimeSlicing)...), Usage: "resources that are shared by time-slicing"},
	{Name: "mps", Type: schema.ObjectOf(modeKeys(inventory.MPS)...), Usage: "resources that are shared by MPS; full GPUs only"},
}

// modeKeys are those of a mode of sharing.
func modeKeys(mode inventory.SharingMode) []schema.Key {
	one := schema.Key{Name: "failRequestsGreaterThanOne", Default: "false", Type: strictBool, Usage: "a request for two units fails, because it would not give more of a GPU"}
	if mode == inventory.MPS {
		one.Default, one.Type = "true", schema.OneOf("true")
	}
	return []schema.Key{
		{Name: "renameByDefault", Default: "false", Type: strictBool, Usage: "append `.shared` to the names of shared resources"},
		one,
		{Name: "resources", Type: schema.ListOf(schema.ObjectOf(shareKeys(mode)...), 0), Usage: "each resource at most once"},
	}
}

// shareKeys are those of a shared resource.
func shareKeys(mode inventory.SharingMode) []schema.Key {
	replicas := schema.Int(2, maxReplicas)
	if mode == inventory.MPS {
		replicas.Max = maxClients
	}
	someDevices := schema.ListOf(schema.Type{Or: []schema.Type{deviceType, uuidType}}, 1)
	return []schema.Key{
		{Name: "name", Required: true, Type: poolType, Usage: "the resource: `gpu`, `mig-<profile>`, or a name from `resources` or `policy.rules`"},
		{Name: "replicas", Required: true, Type: replicas, Usage: "units of each device"},
		{Name: "rename", Type: poolType, Usage: "another name for the units"},
		{Name: "devices", Default: "all", Type: schema.Type{Or: []schema.Type{schema.OneOf("all"), schema.Int(1, maxReplicas), someDevices}, Words: "`all`, a number, or a list of indices and UUIDs"},
			Usage: "which devices of the resource are shared; with less than all, a `rename` must distinguish them"},
	}
}

var resourceKeys = []schema.Key{
	{Name: "gpus", Type: schema.ListOf(schema.ObjectOf(namingKeys...), 0), Usage: "names of full GPUs by product name: `{pattern: \"*H100*\", name: h100}`"},
	{Name: "mig", Type: schema.ListOf(schema.ObjectOf(namingKeys...), 0), Usage: "names of MIG instances by profile: `{pattern: \"1g.*\", name: small}`"},
}

var namingKeys = []schema.Key{
	{Name: "pattern", Required: true, Type: patternType, Usage: "product name or profile, with `*` for any text"},
	{Name: "name", Required: true, Type: poolType, Usage: "name of the resource, with `nvidia.com/` or without"},
}

// The types of values that several keys have. Their readers are readUUID, readIndices, readSize, readPool and readPatterns.
var (
	uuidType    = schema.Match(`^(GPU|MIG)-[^*, \t\n]+$`, "a UUID")
	indexType   = schema.Type{Pattern: `^(0|[1-9][0-9]{0,2})([-:](0|[1-9][0-9]{0,2}))?$`, Words: "an index", Max: maxIndex}
	deviceType  = schema.Type{Pattern: `^(0|[1-9][0-9]{0,2})(:(0|[1-9][0-9]{0,2}))?$`, Words: "an index", Max: maxIndex}
	sizeType    = schema.Match(`^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(KiB|MiB|GiB|TiB)$`, "a size in `KiB`, `MiB`, `GiB` or `TiB`, from 1MiB to 16TiB")
	poolType    = schema.Match(`^(nvidia\.com/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,50}[A-Za-z0-9])?$`, "a name of at most 52 characters")
	patternType = schema.Match(`.`, "text")
	strictBool  = schema.Type{Kind: schema.Bool}
)
