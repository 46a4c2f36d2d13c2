package metrics

import (
	"fmt"
	"strconv"
	"testing"
)

// A number has no more digits than it needs: 35 % are 0.35, and not 0.35000000000000003.
func TestShortNumbers(t *testing.T) {
	for n := range uint64(2000) {
		for unit, format := range map[float64]string{percent: "%d.%02d", milli: "%d.%03d"} {
			size := uint64(1/unit + 0.5)
			want, err := strconv.ParseFloat(fmt.Sprintf(format, n/size, n%size), 64)
			if got := (&reading{unit: unit}).value(n); got != want || err != nil {
				t.Fatalf("%d of %v: %v, want %v", n, unit, got, want)
			}
		}
	}
}
