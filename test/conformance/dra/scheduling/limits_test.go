//go:build !before1.37

package scheduling

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// What claims get of a GPU of 80 GiB without the reserve, whose shares have a limit of 20 GiB by the policy. Fence 9: three claims of 20, 30 and 20 GiB fit, a fourth of 20 pends,
// and one of 10 fits. Fence 10 and 35: the consumed capacity, which is the limit, is whole MiB, also of a claim that asks for none, for 0, for 1 byte or for 1500M.
func TestLimitsOfClaims(t *testing.T) {
	const pends = "pends"
	s := coretest.GPUs(1)
	for about, tc := range map[string]struct {
		overcommit bool
		replicas   int
		extra      uint64 // bytes that the GPU has beside 81 GiB
		claims     [][2]string
	}{
		"sums":                   {replicas: 4, claims: [][2]string{{"20Gi", "20Gi"}, {"30Gi", "30Gi"}, {"20Gi", "20Gi"}, {"20Gi", pends}, {"10Gi", "10Gi"}}},
		"roundings":              {replicas: 4, claims: [][2]string{{"1500M", "1431Mi"}, {"0", "512Mi"}, {"1", "512Mi"}, {"", "20Gi"}}},
		"a byte too much":        {replicas: 4, claims: [][2]string{{"1073741825", "1025Mi"}}},
		"no more than shares":    {replicas: 2, claims: [][2]string{{"1Gi", "1Gi"}, {"1Gi", "1Gi"}, {"1Gi", pends}}},
		"all of it":              {replicas: 4, claims: [][2]string{{"80Gi", "80Gi"}, {"1", pends}}},
		"more than there is":     {replicas: 4, claims: [][2]string{{"81Gi", pends}, {"80Gi", "80Gi"}}},
		"memory of no whole MiB": {replicas: 4, extra: 123456, claims: [][2]string{{"81920Mi", "80Gi"}}},
		"overcommit":             {overcommit: true, replicas: 6, claims: [][2]string{{"80Gi", "80Gi"}, {"81Gi", pends}, {"", "20Gi"}, {"", "20Gi"}, {"", pends}}},
	} {
		s.Devices[0].Memory = 81<<30 + tc.extra
		c := limited(tc.replicas, 20<<30, tc.overcommit)
		cl := newCluster(t, printedClasses(t, c), publish(t, build(s, c, health.Ledger{})))
		for i, claim := range tc.claims {
			request := one("gpu-shared.nvidia.com")
			if claim[0] != "" {
				request = one("gpu-shared.nvidia.com", fmt.Sprintf("capacity: {requests: {memory: %q}}", claim[0]))
			}
			results, err := cl.allocate(fmt.Sprint(i), request)
			got := pends
			if len(results) == 1 {
				consumed := results[0].ConsumedCapacity["memory"]
				got = consumed.String()
				if consumed.Value()%(1<<20) != 0 || claim[1] != pends && consumed.Cmp(resource.MustParse(claim[1])) != 0 {
					t.Errorf("%s, claim %d: %s", about, i, got)
				}
			}
			if err != nil || (got == pends) != (claim[1] == pends) {
				t.Errorf("%s, claim %d of %q: %s, want %s: %v", about, i, claim[0], got, claim[1], err)
			}
		}
	}
}
