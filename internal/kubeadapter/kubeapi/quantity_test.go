package kubeapi

import "testing"

func TestParseQuantity(t *testing.T) {
	for text, want := range map[string]string{
		"0": "0", "4": "4", "1k": "1000", "2k": "2000", "1e3": "1000", "1E3": "1000", "0.5k": "500", "1500m": "1.5", "2Ki": "2048", "80Gi": "85899345920",
		"1E": "1000000000000000000", "1e-1": "0.1", "-1": "-1", "+3": "3", ".5": "0.5", "1n": "0.000000001",
		"": "", "k": "", "1K": "", "1kk": "", "1 k": "", "1ee3": "", "1e": "", "1e99": "", "1/2": "", "1..2": "", "x": "", "1_000": "", "0x10": "",
	} {
		value, ok := ParseQuantity(text)
		if ok != (want != "") {
			t.Errorf("%q: %v", text, value)
			continue
		}
		if got := ""; ok {
			if got = value.FloatString(9); !equalNumber(got, want) {
				t.Errorf("%q: %s, want %s", text, got, want)
			}
		}
	}
}

func equalNumber(a, b string) bool {
	x, _ := ParseQuantity(a)
	y, _ := ParseQuantity(b)
	return x != nil && y != nil && x.Cmp(y) == 0
}
