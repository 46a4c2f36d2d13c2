package ownership

import (
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/test/check"
)

// An agent that was alone until another one began to write its first file, which takes long: a GPU that the policy adds meanwhile may be the
// other one's, and takes no work until that is known.
func TestFirstFileOfAnotherAgentTakesLong(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		n := nomad(t, dir, on(inventory.OverlapRefuse, 0))
		pass(5 * time.Second)
		n.expectSchedulable(t, "alone", 0)
		unlock, err := lockFolder(t.Context(), filepath.Join(dir, FolderName))
		check.NoError(t, err)
		other, _ := newStore(t, filepath.Join(dir, FolderName), "k8s-gpu", true)
		check.NoError(t, other.write(recorded("k8s-gpu", 2, whole(1))))
		check.NoError(t, n.ApplyPolicy(t.Context(), on(inventory.OverlapRefuse, 0, 1)))
		for range 20 {
			pass(time.Second)
			n.expectSchedulable(t, "while the other agent has the lock", 0)
		}
		unlock()
		pass(time.Minute)
		n.expectSchedulable(t, "unlocked", 0)
	})
}
