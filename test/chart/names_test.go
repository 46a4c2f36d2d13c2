package chart

import (
	"errors"
	"testing"

	"github.com/tandem-gpu/tandem/test/docs/names"
)

// What docs/compatibility.md has of the values of NVIDIA's charts is true: those that are the same are accepted, those that are not covered
// are refused, and none is ignored.
func TestNamesOfNVIDIAsCharts(t *testing.T) {
	lists, err := names.Read("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, list := range []string{"k8s-device-plugin-values", "dra-driver-values"} {
		if len(lists[list]) < 50 {
			t.Errorf("%s has %d values", list, len(lists[list]))
		}
		for _, n := range lists[list] {
			_, refused := render(t, parse(t, n.Detail))
			if refused != nil {
				refused = errors.New("the chart refuses it: " + refused.Error())
			}
			if err := names.Check(list, n, refused); err != nil {
				t.Error(err)
			}
		}
	}
}
