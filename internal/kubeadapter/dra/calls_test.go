package dra

import (
	"errors"
	"os"
	"strings"

	"google.golang.org/grpc"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

func claimsOf(names ...string) (all []*dra.Claim) {
	for _, name := range names {
		all = append(all, &dra.Claim{Namespace: "default", Name: name, Uid: uidOf(name)})
	}
	return all
}

// prepare prepares claims in one call.
func (r *rig) prepare(names ...string) map[string]*dra.NodePrepareResourceResponse {
	r.Helper()
	answer, err := dra.NewDRAPluginClient(r.conn).NodePrepareResources(r.ctx, &dra.NodePrepareResourcesRequest{Claims: claimsOf(names...)})
	r.must(err)
	return answer.GetClaims()
}

// prepareOne prepares a claim and returns its devices, or the error.
func (r *rig) prepareOne(name string) ([]*dra.Device, error) {
	r.Helper()
	one := r.prepare(name)[uidOf(name)]
	if one == nil {
		r.Fatalf("claim %s has no answer", name)
	}
	if text := one.GetError(); text != "" {
		return nil, errors.New(text)
	}
	return one.GetDevices(), nil
}

// mustPrepare is prepareOne of a claim that can be prepared.
func (r *rig) mustPrepare(name string) []*dra.Device {
	r.Helper()
	devices, err := r.prepareOne(name)
	r.must(err)
	return devices
}

// mustRefuse checks that a claim is not prepared, and that the error has a text.
func (r *rig) mustRefuse(name, text string) {
	r.Helper()
	if _, err := r.prepareOne(name); err == nil || !strings.Contains(err.Error(), text) {
		r.Errorf("claim %s: %v, want %q", name, err, text)
	}
}

// unprepare unprepares a claim.
func (r *rig) unprepare(name string) error {
	r.Helper()
	answer, err := dra.NewDRAPluginClient(r.conn).NodeUnprepareResources(r.ctx, &dra.NodeUnprepareResourcesRequest{Claims: claimsOf(name)})
	r.must(err)
	one := answer.GetClaims()[uidOf(name)]
	if one == nil {
		r.Fatalf("claim %s has no answer", name)
	}
	if text := one.GetError(); text != "" {
		return errors.New(text)
	}
	return nil
}

// record is the record of a claim on disk; the zero value if there is none.
func (r *rig) record(name string) prepared.Claim {
	r.Helper()
	store, err := prepared.Open(r.adapter.claimsDir(), boot, nil)
	r.must(err)
	c, _ := store.Get(uidOf(name))
	return c
}

// wantRecord checks how far the record of a claim is on disk; "" = there is none.
func (r *rig) wantRecord(name string, state prepared.State) {
	r.Helper()
	if c := r.record(name); c.State != state {
		r.Errorf("the record is %+v, want %q", c, state)
	}
}

// wantFile checks whether a file is there.
func (r *rig) wantFile(path string, there bool) {
	r.Helper()
	if _, err := os.Lstat(path); (err == nil) != there {
		r.Errorf("%s: there is a file: %t", path, !there)
	}
}

// wantProblems checks that operators are told of problems with these texts; without one, that they are told of none.
func (r *rig) wantProblems(texts ...string) {
	r.Helper()
	lines := strings.Join(problem.Lines(r.adapter.Problems()), "\n")
	for _, text := range texts {
		if !strings.Contains(lines, text) {
			r.Errorf("problems %q, want %q", lines, text)
		}
	}
	if len(texts) == 0 && lines != "" {
		r.Errorf("problems %q", lines)
	}
}

// prepareQuietly is prepareOne for other goroutines than that of the test.
func (r *rig) prepareQuietly(conn *grpc.ClientConn, name string) error {
	answer, err := dra.NewDRAPluginClient(conn).NodePrepareResources(r.ctx, &dra.NodePrepareResourcesRequest{Claims: claimsOf(name)})
	if text := answer.GetClaims()[uidOf(name)].GetError(); err == nil && text != "" {
		return errors.New(text)
	}
	return err
}

func (r *rig) unprepareQuietly(conn *grpc.ClientConn, name string) error {
	answer, err := dra.NewDRAPluginClient(conn).NodeUnprepareResources(r.ctx, &dra.NodeUnprepareResourcesRequest{Claims: claimsOf(name)})
	if text := answer.GetClaims()[uidOf(name)].GetError(); err == nil && text != "" {
		return errors.New(text)
	}
	return err
}
