package publisher

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// names are those of a node's slices: <node>-<driver>-<number>, and <node>-<driver>-<number>-<random> where another client has the first.
// deploy/dra/admission.yaml keeps them to the agent of the node.
type names struct{ prefix string }

const maxName = 253 // bytes of an object's name: a DNS subdomain

// newNames puts a hash in the place of a node's name that is too long.
func newNames(node, driver string) names {
	if longest := len(node) + len(driver) + len("--99999-abcdefgh"); longest > maxName {
		sum := sha256.Sum256([]byte(node))
		node = fmt.Sprintf("%x", sum[:16])
	}
	return names{node + "-" + driver + "-"}
}

func (n names) of(i int) string { return n.prefix + strconv.Itoa(i) }

// alternative is another name of a number.
func (n names) alternative(i int) string { return n.of(i) + "-" + strings.ToLower(rand.Text()[:8]) }

// dryRun is the name of a slice that is never stored.
func (n names) dryRun() string { return n.of(0) + "-dryrun" }

// number follows the prefix in the name of a slice.
var number = regexp.MustCompile(`^(0|[1-9][0-9]{0,4})(-[a-z0-9]+)?$`)

// index returns the number of a slice, and false for a slice of another client.
func (n names) index(name string) (int, bool) {
	rest, ok := strings.CutPrefix(name, n.prefix)
	parts := number.FindStringSubmatch(rest)
	if !ok || parts == nil {
		return 0, false
	}
	i, err := strconv.Atoi(parts[1])
	return i, err == nil
}

func (n names) own(name string) bool { _, ok := n.index(name); return ok }
