package dra

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/prepared"
)

// server is the DRA service.
type server struct {
	dra.UnimplementedDRAPluginServer
	*Adapter
}

// NodePrepareResources implements the API. Each claim has its own answer, in which an error is that of this claim.
func (s *server) NodePrepareResources(ctx context.Context, r *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	claims := each(r.GetClaims(), func(ref claimRef) *dra.NodePrepareResourceResponse {
		defer s.observe("NodePrepareResources", time.Now())
		c, err := within(ctx, s.limits, func(ctx context.Context, step *step) (prepared.Claim, error) { return s.prepare(ctx, ref, step) })
		s.count(func(n *Stats) {
			if err != nil {
				n.PrepareErrors++
				return
			}
			n.Prepares++
		})
		if err != nil {
			log := s.opts.Log.With("namespace", ref.namespace, "claim", ref.name, "uid", ref.uid)
			if by := holdersOf(err); len(by) > 0 {
				log = log.With("held_by", strings.Join(by, ", "))
			}
			log.Warn("claim not prepared", "error", err)
			return &dra.NodePrepareResourceResponse{Error: oneLine(err)}
		}
		return answer(c)
	})
	return &dra.NodePrepareResourcesResponse{Claims: claims}, nil
}

// observe reports the work on a claim that began at a time, and ends now.
func (s *server) observe(method string, began time.Time) {
	if s.opts.Observe != nil {
		s.opts.Observe(method, time.Since(began))
	}
}

// answer is what the kubelet gets for a prepared claim. It is a function of the record.
func answer(c prepared.Claim) *dra.NodePrepareResourceResponse {
	r := &dra.NodePrepareResourceResponse{}
	for _, one := range c.Results {
		d := &dra.Device{PoolName: one.Pool, DeviceName: one.Device, CdiDeviceIds: one.CDI}
		if one.Request != "" {
			d.RequestNames = []string{one.Request}
		}
		if one.ShareID != "" {
			d.ShareId = &one.ShareID
		}
		r.Devices = append(r.Devices, d)
	}
	return r
}

// NodeUnprepareResources implements the API. It needs neither API server nor driver.
func (s *server) NodeUnprepareResources(ctx context.Context, r *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	claims := each(r.GetClaims(), func(ref claimRef) *dra.NodeUnprepareResourceResponse {
		defer s.observe("NodeUnprepareResources", time.Now())
		_, err := within(ctx, s.limits, func(ctx context.Context, step *step) (struct{}, error) {
			return struct{}{}, s.unprepare(ctx, ref, step)
		})
		s.count(func(n *Stats) {
			if err != nil {
				n.UnprepareErrors++
				return
			}
			n.Unprepares++
		})
		if err != nil {
			s.opts.Log.Warn("claim not unprepared", "namespace", ref.namespace, "claim", ref.name, "uid", ref.uid, "error", err)
			return &dra.NodeUnprepareResourceResponse{Error: oneLine(err)}
		}
		return &dra.NodeUnprepareResourceResponse{}
	})
	return &dra.NodeUnprepareResourcesResponse{Claims: claims}, nil
}

// each calls do for each claim of a request at the same time, and returns the results by UID.
func each[R any](claims []*dra.Claim, do func(claimRef) R) map[string]R {
	all := make(map[string]R, len(claims))
	refs := map[claimRef]bool{}
	var mu sync.Mutex
	var running sync.WaitGroup
	for _, c := range claims {
		ref := claimRef{c.GetNamespace(), c.GetName(), c.GetUid()}
		if refs[ref] {
			continue
		}
		refs[ref] = true
		running.Go(func() {
			r := do(ref)
			mu.Lock()
			defer mu.Unlock()
			all[ref.uid] = r
		})
	}
	running.Wait()
	return all
}

// step is what a call waits for, for the error of one that does not end in time. Each text is a complete sentence.
type step struct{ text atomic.Pointer[string] }

func (s *step) set(text string) { s.text.Store(&text) }

// within calls do in a goroutine of its own and returns its result. If do has not ended when the time of a call is over, or shortly
// after, it is abandoned: a disk may hang.
func within[R any](ctx context.Context, l limits, do func(context.Context, *step) (R, error)) (R, error) {
	type result struct {
		value R
		err   error
	}
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, l.call)
	step, done := &step{}, make(chan result, 1)
	step.set("not begun")
	go func() {
		defer cancel()
		value, err := do(ctx, step)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
	}
	select {
	case r := <-done:
		if r.err != nil && ctxError(r.err) {
			return r.value, &PendingError{What: *step.text.Load(), Waited: time.Since(began)}
		}
		return r.value, r.err
	case <-time.After(l.grace):
	}
	var none R
	return none, &PendingError{What: *step.text.Load(), Waited: time.Since(began)}
}

// ctxError reports whether an error is only that a context has ended.
func ctxError(err error) bool {
	return err == context.Canceled || err == context.DeadlineExceeded //nolint:errorlint // a wrapped one has a text of its own
}

// v1beta1 is the DRA service of kubelets that know no later one. Its messages are those of v1 but for the ID of a share, which such a
// kubelet skips. The package of v1beta1 would link k8s.io/apimachinery.
var v1beta1 = grpc.ServiceDesc{
	ServiceName: "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
	HandlerType: (*dra.DRAPluginServer)(nil),
	Methods: []grpc.MethodDesc{
		unary("NodePrepareResources", dra.DRAPluginServer.NodePrepareResources),
		unary("NodeUnprepareResources", dra.DRAPluginServer.NodeUnprepareResources),
	},
	Metadata: "staging/src/k8s.io/kubelet/pkg/apis/dra/v1beta1/api.proto",
}

// v1beta1Name is v1beta1 among the supported versions (DRAPluginService of k8s.io/kubelet/pkg/apis/dra/v1beta1).
const v1beta1Name = "v1beta1.DRAPlugin"

// unary is a method of the DRA service. The server has no interceptors.
func unary[Q, R any](name string, call func(dra.DRAPluginServer, context.Context, *Q) (*R, error)) grpc.MethodDesc {
	return grpc.MethodDesc{
		MethodName: name,
		Handler: func(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			in := new(Q)
			if err := decode(in); err != nil {
				return nil, err
			}
			s, ok := srv.(dra.DRAPluginServer)
			if !ok {
				return nil, fmt.Errorf("%T is no DRA service", srv)
			}
			return call(s, ctx, in)
		},
	}
}
