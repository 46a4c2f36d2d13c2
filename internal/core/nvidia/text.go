package nvidia

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/util/oneline"
)

// Each string of the driver becomes a value here. It may have any byte: from a damaged board, or from memory of another
// version of a structure. Nomad's protocol refuses text that is no UTF-8, and files and names of devices have UUIDs, so
// a value has neither.

// maxText limits a cleaned text in bytes. NVML's longest has 96.
const maxText = 128

// cleanText returns a text of the driver without spaces around it. A text with bytes that are no UTF-8, or that can't
// be printed, is one line without them.
func cleanText(text string) string {
	text = strings.TrimSpace(text)
	isOther := func(r rune) bool { return !unicode.IsPrint(r) }
	if len(text) <= maxText && utf8.ValidString(text) && !strings.ContainsFunc(text, isOther) {
		return text
	}
	return oneline.Of(text, maxText)
}

// textOf is f with its result cleaned.
func textOf(f func() (string, nvml.Return)) func() (string, nvml.Return) {
	return converted(f, cleanText)
}

// uuids matches the UUIDs that drivers give devices: "GPU-" or "MIG-" and a UUID, of MIG instances before driver 470
// "MIG-GPU-" with the numbers of the instances, of integrated GPUs (Orin, Thor) the UUID alone.
var uuids = regexp.MustCompile(
	`^(?:GPU-|MIG-|)[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$|` +
		`^MIG-GPU-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}/[0-9]{1,3}/[0-9]{1,3}$`)

// uuidError means that the driver returned a text as the UUID of a device that is none.
type uuidError struct{ text string }

func (e *uuidError) Error() string {
	return fmt.Sprintf("the driver returned the UUID %q, which is none", oneline.Of(e.text, maxText))
}

// readUUID reads the UUID of a handle. known is the UUID that it is expected to have; "" = it is not known.
func readUUID(c *caller, h nvml.Device, known gpu.DeviceID) gpu.DeviceID {
	c.subject = h
	id := retained(c, "nvmlDeviceGetUUID", uuidOf(h))
	c.subject = nil
	if known != "" && id == known {
		return id
	}
	return identifying(c, id)
}

// uuidOf returns the call for the UUID of a handle. An empty UUID is no answer.
func uuidOf(h nvml.Device) func() (gpu.DeviceID, nvml.Return) {
	return func() (gpu.DeviceID, nvml.Return) {
		id, ret := h.GetUUID()
		if ret == nvml.SUCCESS && id == "" {
			ret = nvml.ERROR_NOT_SUPPORTED
		}
		return gpu.DeviceID(id), ret
	}
}

// identifying returns id. A text that is no UUID identifies no device: then it fails as if the UUID could not be read.
func identifying(c *caller, id gpu.DeviceID) gpu.DeviceID {
	if c.err != nil {
		return id
	}
	if !uuids.MatchString(string(id)) {
		c.err = &uuidError{string(id)}
		return ""
	}
	return id
}
