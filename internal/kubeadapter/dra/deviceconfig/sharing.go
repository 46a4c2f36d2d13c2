package deviceconfig

import (
	"cmp"
	"encoding/json"
	"maps"
	"math/big"
	"slices"
	"strings"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// sharing reads the field sharing. MigDeviceConfig has no timeSlicingConfig.
func (p *parser) sharing(c *Config, text json.RawMessage) {
	known := []string{"strategy", "timeSlicingConfig", "mpsConfig"}
	if c.Kind == MIG {
		known = []string{"strategy", "mpsConfig"}
	}
	f := p.object(text, "sharing", known...)
	strategy := p.text(f, "sharing", "strategy")
	switch c.Strategy = Strategy(strategy); c.Strategy {
	case TimeSlicing, MPS:
	case "":
		if f != nil {
			p.errorf("sharing.strategy is missing: it is TimeSlicing or MPS")
		}
	default:
		p.errorf("sharing.strategy %q is not supported: it is TimeSlicing or MPS", strategy)
	}
	if text, ok := f["timeSlicingConfig"]; ok {
		if c.Strategy == MPS {
			p.errorf("sharing.timeSlicingConfig needs the strategy TimeSlicing")
		}
		p.timeSlicing(text)
	}
	if text, ok := f["mpsConfig"]; ok {
		if c.Strategy == TimeSlicing {
			p.errorf("sharing.mpsConfig needs the strategy MPS")
		}
		p.mps(c, text)
	}
}

func (p *parser) timeSlicing(text json.RawMessage) {
	const path = "sharing.timeSlicingConfig"
	f := p.object(text, path, "interval")
	switch interval := p.text(f, path, "interval"); interval {
	case "", "Default":
	case "Short", "Medium", "Long":
		p.errorf("%s.interval %s is not supported: this agent does not change the time slice of a GPU; use Default or leave it out", path, interval)
	default:
		p.errorf("%s.interval %q is not known; use Default or leave it out", path, interval)
	}
}

func (p *parser) mps(c *Config, text json.RawMessage) {
	const path = "sharing.mpsConfig"
	f := p.object(text, path, "defaultActiveThreadPercentage", "defaultPinnedDeviceMemoryLimit", "defaultPerDevicePinnedMemoryLimit", "multiUser")
	if v, ok := f["defaultActiveThreadPercentage"]; ok {
		if json.Unmarshal(v, &c.Threads) != nil || c.Threads < 1 || c.Threads > 100 {
			p.errorf("%s.defaultActiveThreadPercentage %s is not a number from 1 to 100", path, v)
		}
	}
	if v, ok := f["defaultPinnedDeviceMemoryLimit"]; ok {
		if c.Memory = parseMemory(v); c.Memory == 0 {
			p.errorf("%s.defaultPinnedDeviceMemoryLimit %s is not an amount of at least 1Mi, such as 8Gi", path, v)
		}
	}
	if v, ok := f["defaultPerDevicePinnedMemoryLimit"]; ok && string(v) != "{}" {
		p.errorf("%s.defaultPerDevicePinnedMemoryLimit is not supported; use defaultPinnedDeviceMemoryLimit, in a configuration for each request", path)
	}
	if v, ok := f["multiUser"]; ok {
		var multi bool
		if json.Unmarshal(v, &multi) != nil {
			p.errorf("%s.multiUser %s is not a boolean", path, v)
		} else if multi {
			p.errorf("%s.multiUser is not supported: the MPS control daemon of the pool decides about it; remove it", path)
		}
	}
}

// object returns the fields of an object that are not null. Names are case-sensitive, and each must be known, as the API server decodes strictly.
func (p *parser) object(text json.RawMessage, path string, known ...string) map[string]json.RawMessage {
	var fields map[string]json.RawMessage
	if json.Unmarshal(text, &fields) != nil || fields == nil {
		p.errorf("%s is not an object", cmp.Or(path, "parameters"))
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(known, name) {
			p.errorf("field %s is not known; known are %s", strings.TrimPrefix(path+"."+name, "."), strings.Join(known, ", "))
		}
	}
	maps.DeleteFunc(fields, func(_ string, v json.RawMessage) bool { return string(v) == "null" })
	return fields
}

// text returns a field that is a string; "" if it is missing.
func (p *parser) text(fields map[string]json.RawMessage, path, name string) (s string) {
	if v, ok := fields[name]; ok && json.Unmarshal(v, &s) != nil {
		p.errorf("%s.%s %s is not a string", path, name, v)
	}
	return s
}

// parseMemory parses a resource.Quantity, which is a string or a number, as bytes: at least 1Mi, since CUDA reads whole MiB. It returns 0
// for anything else.
func parseMemory(v json.RawMessage) uint64 {
	amount, ok := kubeapi.ParseQuantity(strings.Trim(string(v), `"`))
	if !ok {
		return 0
	}
	bytes := new(big.Int).Quo(amount.Num(), amount.Denom())
	if !bytes.IsUint64() || bytes.Uint64() < 1<<20 || bytes.Uint64() > 1<<50 {
		return 0
	}
	return bytes.Uint64()
}
