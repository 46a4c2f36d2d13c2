package nomadadapter

import (
	"strconv"

	"github.com/hashicorp/nomad/plugins/base"
	"github.com/hashicorp/nomad/plugins/shared/hclspec"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/schema"
)

// Settings are the settings of the plugin: those of its config block and of the policy file.
type Settings = config.Nomad

// blockSchema is what Nomad checks a config block against before SetConfig. Every key is optional.
var blockSchema = newSchema()

// newSchema is the schema of all keys.
//
// A mapping is a block and not an attribute of type map: Nomad reads its agent's configuration as HCL 1, in which both
// spellings, xids { ... } and xids = { ... }, are a list of maps, which only a block accepts.
func newSchema() *hclspec.Spec {
	keys := map[string]*hclspec.Spec{}
	for _, s := range config.NomadSpecs() {
		switch s.Kind {
		case schema.Mapping:
			keys[s.HCL] = hclspec.NewBlockAttrs(s.HCL, "string", false)
		case schema.List:
			keys[s.HCL] = hclspec.NewAttr(s.HCL, "list(string)", false) // no default: an empty list is not the same as none
		case schema.Number:
			keys[s.HCL] = optional(s.HCL, "number", s.Default)
		case schema.Bool:
			keys[s.HCL] = optional(s.HCL, "bool", s.Default)
		default:
			keys[s.HCL] = optional(s.HCL, "string", strconv.Quote(s.Default))
		}
	}
	return hclspec.NewObject(keys)
}

func optional(key, kind, value string) *hclspec.Spec {
	return hclspec.NewDefault(hclspec.NewAttr(key, kind, false), hclspec.NewLiteral(value))
}

// decode reads a config block in Nomad's encoding. No bytes are a block without keys.
func decode(msgpack []byte) (config.Block, error) {
	var keys map[string]any
	if len(msgpack) > 0 {
		if err := base.MsgPackDecode(msgpack, &keys); err != nil {
			return config.Block{}, err
		}
	}
	return config.NewBlock(keys), nil
}
