package bigfleet_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/fleet/kube"
	"github.com/tandem-gpu/tandem/internal/fleet/nomad"
	"github.com/tandem-gpu/tandem/internal/rescue"
	"github.com/tandem-gpu/tandem/test/bigfleet"
	"github.com/tandem-gpu/tandem/test/check"
)

const nodes = 3

// faulty are the servers of a fleet, and what has a GPU fail.
type faulty interface {
	Config(dir, mode string) (string, error)
	Open()
	Close()
	Fail(node int, gpus ...int)
	Acts() []time.Time
}

// gpu-fleet's own clients read the servers of both orchestrators, see a fault, and move its work to the free node.
func TestServers(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct {
		servers faulty
		client  func(config string) (fleet.Cluster, error)
	}{
		{bigfleet.NewKube(nodes), func(string) (fleet.Cluster, error) {
			return kube.New(kube.Options{Name: "east", Mode: rescue.ModeAct, Kubeconfig: filepath.Join(dir, "kubeconfig"), Log: slog.New(slog.DiscardHandler)})
		}},
		{bigfleet.NewNomad(nodes), func(config string) (fleet.Cluster, error) {
			return nomad.New(nomad.Options{Name: "dc1", Mode: rescue.ModeAct, Address: config[strings.Index(config, "http"):strings.LastIndex(config, `"`)]})
		}},
	} {
		config, err := tc.servers.Config(dir, "act")
		check.NoError(t, err)
		tc.servers.Open()
		defer tc.servers.Close()
		c, err := tc.client(config)
		check.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- c.Run(ctx) }()
		shown := until(t, c, func(s rescue.Cluster) bool {
			return s.Problem == "" && len(s.Nodes) == nodes && len(s.Work) == (nodes-1)*bigfleet.GPUs
		})
		work := shown.Work[0]
		n := slices.Index([]string{"node-0000", "node-0001"}, work.Node)
		tc.servers.Fail(n, 0)
		until(t, c, func(s rescue.Cluster) bool {
			return slices.ContainsFunc(s.Nodes, func(o rescue.Node) bool { return o.Name == work.Node && len(o.Faults) == 1 })
		})
		act := rescue.Act{Subject: rescue.Subject{Cluster: c.Name(), Node: work.Node, Work: work.ID}, Work: []rescue.Target{{ID: work.ID, Namespace: work.Namespace, Name: work.Name}}}
		if got := c.Do(ctx, act); got.Kind != rescue.Accepted || len(tc.servers.Acts()) != 1 {
			t.Errorf("%s: %+v", c.Name(), got)
		}
		until(t, c, func(s rescue.Cluster) bool {
			return slices.ContainsFunc(s.Work, func(o rescue.Work) bool { return o.Node == "node-0002" && o.Phase == rescue.Running })
		})
		cancel()
		check.NoError(t, <-ended)
	}
}

func until(t *testing.T, c fleet.Cluster, ok func(rescue.Cluster) bool) rescue.Cluster {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		s := c.Shown().Load()
		if ok(s) {
			return s
		}
		if time.Now().After(end) {
			t.Fatalf("%s: %+v", c.Name(), s)
		}
	}
}
