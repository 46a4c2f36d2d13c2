package nomadadapter

import (
	"fmt"
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func BenchmarkReserve(b *testing.B) {
	for _, n := range []int{8, 64} {
		s := newStand(b)
		s.Source.Set(machine(coretest.GPUs(n)))
		remote := dial(b, s.Plugin)
		for _, bm := range []struct {
			name string
			call func([]string) error
		}{
			{"direct", func(ids []string) error { _, err := s.Reserve(ids); return err }},
			{"socket", func(ids []string) error { _, err := remote.Reserve(ids); return err }},
		} {
			b.Run(fmt.Sprintf("units=%d/%s", n, bm.name), func(b *testing.B) {
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					if err := bm.call([]string{id(i % n)}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

func BenchmarkGroups(b *testing.B) {
	for _, n := range []int{8, 64} {
		inv := machine(coretest.GPUs(n))
		given := naming{}.with(inv)
		b.Run(fmt.Sprintf("units=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if len(groups(inv, given.with(inv))) != 1 {
					b.Fatal("not one group")
				}
			}
		})
	}
}
