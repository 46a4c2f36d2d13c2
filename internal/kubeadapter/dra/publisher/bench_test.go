package publisher_test

import (
	"context"
	"encoding/json"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/publisher"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/resourceslice"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// devicesOf are the devices of eight GPUs with a number of shares each.
func devicesOf(shares int, asDevices bool) []kubeapi.Device {
	config := core.DefaultConfig()
	config.API = inventory.DRA
	if shares > 1 {
		config.Policy.Rules = []inventory.Rule{{Sharing: &inventory.Sharing{Mode: inventory.TimeSlicing, Replicas: shares}}}
	}
	inv := core.Build(coretest.GPUs(8), health.Ledger{}, config).WithoutHost()
	return resourceslice.Devices(resourceslice.Input{Allocatable: inv, SharesAsDevices: asDevices})
}

// BenchmarkPublish publishes the devices of a node over TCP, deletes all slices as a kubelet does that starts, and waits until they are
// back: time until the last one is, bytes of the slices as JSON, and memory that client and publisher hold while nothing happens.
func BenchmarkPublish(b *testing.B) {
	for name, devices := range map[string][]kubeapi.Device{
		"8-GPUs": devicesOf(1, false), "8-GPUs-of-200-shares": devicesOf(200, false), "1600-shares-as-devices": devicesOf(200, true),
	} {
		b.Run(name, func(b *testing.B) {
			api := kubeapitest.Start(b)
			api.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: node}})
			desired := watch.NewValue(devices)
			stop := publish(b, api, desired)
			count, bytes := len(api.Slices()), 0
			for _, s := range api.Slices() {
				content, err := json.Marshal(s)
				if err != nil {
					b.Fatal(err)
				}
				bytes += len(content)
			}
			var took []time.Duration
			for b.Loop() {
				began := time.Now()
				api.Wipe(node, "")
				for api.Len() < count {
					time.Sleep(100 * time.Microsecond)
				}
				took = append(took, time.Since(began))
				time.Sleep(max(time.Second, time.Duration(count)*time.Second/5)) // the limit of creates
			}
			running := heap()
			stop()
			idle := running - heap()
			runtime.KeepAlive(desired)
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "ms-p50")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "ms-p99")
			b.ReportMetric(float64(count), "slices")
			b.ReportMetric(float64(bytes), "bytes")
			b.ReportMetric(float64(idle)/1024, "KiB-idle")
		})
	}
}

// publish starts a publisher and returns when all is published. stop ends it and leaves nothing of it.
func publish(b *testing.B, api *kubeapitest.Server, desired *watch.Value[[]kubeapi.Device]) (stop func()) {
	b.Helper()
	client, err := kubeapi.New(kubeapi.Options{Address: api.URL})
	if err != nil {
		b.Fatal(err)
	}
	p := publisher.New(publisher.Options{API: client, Node: node, Driver: resourceslice.Driver, Devices: desired})
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	for p.Published().Problem != "" {
		time.Sleep(time.Millisecond)
	}
	return func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
		client.CloseIdleConnections()
	}
}

// heap is what is in use after a garbage collection.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
