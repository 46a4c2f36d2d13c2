package deviceplugin

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/test/check"
)

// BenchmarkAllocateSocket allocates two of eight GPUs over a unix socket, from concurrent callers with one connection, as the kubelet
// has; by strategies.
func BenchmarkAllocateSocket(b *testing.B) {
	for _, set := range []string{"envvar", "cdi-cri", "envvar cdi-cri", "envvar volume-mounts cdi-annotations cdi-cri"} {
		client := serveSocket(b, strategyServer(kubeadapter.GPUResource, coretest.GPUs(8), core.DefaultConfig(), strings.Fields(set)))
		for _, callers := range []int{1, 4} { // with two GPUs each: one that is allocated at the same time is refused
			b.Run(fmt.Sprintf("%s/callers=%d", strings.ReplaceAll(set, " ", ","), callers), func(b *testing.B) {
				b.ReportAllocs()
				var left atomic.Int64
				left.Store(int64(b.N))
				var running sync.WaitGroup
				for n := range callers {
					r := allocateRequest(gpuIDs(2*n, 2*n+1))
					running.Go(func() {
						for left.Add(-1) >= 0 {
							if _, err := client.Allocate(b.Context(), r); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				running.Wait()
			})
		}
	}
}

// serveSocket serves a plugin until the end of the benchmark, and returns a client of it.
func serveSocket(b *testing.B, s *server) v1beta1.DevicePluginClient {
	b.Helper()
	path := filepath.Join(b.TempDir(), "s")
	listener, err := (&net.ListenConfig{}).Listen(b.Context(), "unix", path)
	check.NoError(b, err)
	g := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(g, s)
	var running sync.WaitGroup
	running.Go(func() { _ = g.Serve(listener) })
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check.NoError(b, err)
	b.Cleanup(func() { _ = conn.Close(); g.Stop(); running.Wait() })
	return v1beta1.NewDevicePluginClient(conn)
}
