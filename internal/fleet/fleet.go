// Package fleet runs the decisions of package rescue for the clusters of a team: it reads them, keeps the ledger, makes the acts and shows all of it.
// It knows neither orchestrator: packages kube and nomad below it do.
//
//	Cluster (kube, nomad)  follows its servers -> rescue.Cluster, complete values
//	Controller             clusters + ledger -> Policy.Next -> the ledger is written -> the acts are made -> View
//	View                   what the page, the metrics and the commands show
package fleet

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Kind is the orchestrator of a cluster.
type Kind string

// Kinds.
const (
	Kubernetes Kind = "kubernetes"
	Nomad      Kind = "nomad"
)

// Cluster is one Kubernetes cluster or Nomad region. Its methods are safe for concurrent use.
type Cluster interface {
	Name() string
	Kind() Kind

	// Run follows the servers until ctx ends, and stores in Shown. Servers that do not answer are a Problem of what is shown, and no error. The mode
	// of what it shows is the configured one. In mode off it is not run.
	Run(ctx context.Context) error
	Shown() *watch.Value[rescue.Cluster]

	// Follow names the work (Work.ID) of which pools, victims and replacements are needed: that on GPUs with faults, and that of open moves.
	Follow(work []string)

	// Live reads the node of an act and the work on it from the servers, and not from what was read before: for Policy.Still.
	Live(ctx context.Context, a rescue.Act) (rescue.Cluster, error)

	// Do makes the call of an act, once. It ends with ctx.
	Do(ctx context.Context, a rescue.Act) rescue.Answer

	// Mark changes the mark and the eligibility of a node. It returns the index of the change of eligibility; 0 = there was none.
	Mark(ctx context.Context, m rescue.Mark) (index uint64, err error)

	Problems() []problem.Problem // of this program with the cluster, such as a missing right
}

// Version is of a ledger as it was read or written, for a store to find out whether another process or person has written since.
type Version string

// Store has the ledger of the team. Its methods are safe for concurrent use.
type Store interface {
	// Read returns the ledger, which rescue.ParseLedger has checked. A ledger that is missing (ErrNoLedger) or can't be used (*DamagedError) is not an empty one.
	Read(ctx context.Context) (rescue.Ledger, Version, error)

	// Write replaces the version of the ledger that was read. It fails with ErrConflict, and changes nothing, if another one is stored. After
	// any other error the ledger may be the one before or the new one.
	Write(ctx context.Context, l rescue.Ledger, was Version) (Version, error)

	// Create stores an empty ledger; ErrExists = there is one.
	Create(ctx context.Context) error

	String() string // where it is, for messages: "ConfigMap tandem/gpu-fleet in cluster east"
}

// Errors of a Store.
var (
	ErrNoLedger = errors.New("there is no ledger: create it once by \"gpu-fleet init\"")
	ErrExists   = errors.New("there is a ledger already")
	ErrConflict = errors.New("another process has written the ledger")
)

// DamagedError means that what is stored is not a ledger of this program.
type DamagedError struct{ Err error }

func (e *DamagedError) Error() string { return fmt.Sprintf("the ledger is damaged: %v", e.Err) }

// Unwrap returns the cause.
func (e *DamagedError) Unwrap() error { return e.Err }

// Leader elects one of several processes of a team.
type Leader interface {
	// Lead waits until this process leads, and calls f, whose context ends when it does not lead any more: by its own clock, so that it ends before
	// another process leads. Lead returns when f has; it gives up the lead first. It is called again to lead again. It returns an error only if ctx
	// has ended or no election is possible.
	Lead(ctx context.Context, f func(context.Context)) error

	Holder() string // who leads, as far as this process knows; "" = not known
}

// CallTimeout is for how long a call for an act or a mark may last. Next repeats an act without an answer after 15 s.
const CallTimeout = 10 * time.Second
