package nomadadapter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/nomad/plugins/device"
	"github.com/hashicorp/nomad/plugins/shared/structs"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
)

func usage(n int) gpu.Usage {
	g := gpu.OptionalUint64Of
	return gpu.Usage{
		Device: coretest.GPU(n),
		Power:  g(123_456), PowerLimit: g(700_000), GPU: g(97), Memory: g(41), Encoder: g(1), Decoder: g(2),
		Temperature: g(63), MemoryUsed: g(1024 << 20), MemoryTotal: g(81559 << 20),
		BAR1Used: g(1 << 20), BAR1Total: g(131072 << 20), ECCL1: g(0), ECCL2: g(3), ECCMemory: g(7),
	}
}

// instances merges the statistics of all groups and checks what Nomad requires.
func instances(t *testing.T, r *device.StatsResponse) map[string]*device.DeviceStats {
	t.Helper()
	if r.Error != nil {
		t.Fatalf("the stream failed: %v", r.Error)
	}
	all := map[string]*device.DeviceStats{}
	for _, g := range r.Groups {
		for id, s := range g.InstanceStats {
			if s == nil || s.Stats == nil || s.Summary == nil || s.Timestamp.IsZero() || len(s.Stats.Attributes) != 12 {
				t.Errorf("%s: %+v", id, s)
			}
			all[id] = s
		}
	}
	if _, err := json.Marshal(r.Groups); err != nil {
		t.Error(err)
	}
	return all
}

func TestStats(t *testing.T) {
	s := newFixture(t, nodeInventory(coretest.GPUs(2), lost(1)))
	s.Source.SetUsage([]gpu.Usage{usage(0)}, nil)
	before := time.Now()
	r := receive(t, openStats(t.Context(), t, nomadtest.Serve(t, s.Plugin), time.Hour))
	if len(r.Groups) != 1 || r.Groups[0].Vendor != "nvidia" || r.Groups[0].Type != "gpu" || r.Groups[0].Name != "NVIDIA H100 80GB HBM3" {
		t.Fatalf("groups: %+v", r.Groups)
	}
	got := instances(t, r)
	if len(got) != 2 {
		t.Fatalf("%d devices", len(got))
	}
	if at := got[gpuID(0)].Timestamp; at.Before(before.Add(-time.Second)) || at.After(time.Now().Add(time.Second)) {
		t.Errorf("taken at %s", at)
	}
	n := func(v int64) *int64 { return &v }
	want := map[string]*structs.StatValue{
		"Power usage":         {Unit: "W", IntNumeratorVal: n(123), IntDenominatorVal: n(700), Desc: "Power usage for this GPU in watts and its associated circuitry (e.g. memory) / Maximum GPU Power"},
		"GPU utilization":     {Unit: "%", IntNumeratorVal: n(97), Desc: "Percent of time over the past sample period during which one or more kernels were executing on the GPU."},
		"Memory utilization":  {Unit: "%", IntNumeratorVal: n(41), Desc: "Percentage of bandwidth used during the past sample period"},
		"Encoder utilization": {Unit: "%", IntNumeratorVal: n(1), Desc: "Percent of time over the past sample period during which GPU Encoder was used"},
		"Decoder utilization": {Unit: "%", IntNumeratorVal: n(2), Desc: "Percent of time over the past sample period during which GPU Decoder was used"},
		"Temperature":         {Unit: "C", IntNumeratorVal: n(63), Desc: "Temperature of the Unit"},
		"Memory state":        {Unit: "MiB", IntNumeratorVal: n(1024), IntDenominatorVal: n(81559), Desc: "UsedMemory / TotalMemory"},
		"BAR1 buffer state":   {Unit: "MiB", IntNumeratorVal: n(1), IntDenominatorVal: n(131072), Desc: "UsedBAR1 / TotalBAR1"},
		"ECC L1 errors":       {Unit: "#", IntNumeratorVal: n(0), Desc: "Requested L1Cache error counter for the device"},
		"ECC L2 errors":       {Unit: "#", IntNumeratorVal: n(3), Desc: "Requested L2Cache error counter for the device"},
		"ECC memory errors":   {Unit: "#", IntNumeratorVal: n(7), Desc: "Requested memory error counter for the device"},
		"Health":              {StringVal: new("healthy"), Desc: "Health of the device, with what is wrong and what to do"},
	}
	checkEqual(t, "statistics", want, got[gpuID(0)].Stats.Attributes)
	checkEqual(t, "summary", want["Memory state"], got[gpuID(0)].Summary)
	for key, v := range got[gpuID(1)].Stats.Attributes { // without usage
		text := "N/A"
		if key == "Health" {
			text = lostText
		}
		checkEqual(t, key+" of the GPU without usage", &structs.StatValue{Unit: want[key].Unit, Desc: want[key].Desc, StringVal: &text}, v)
	}
}

func TestHalfKnownFractionIsNotAvailable(t *testing.T) {
	for _, u := range []gpu.Usage{{Power: gpu.OptionalUint64Of(1)}, {PowerLimit: gpu.OptionalUint64Of(1)}} {
		if v := statistics("healthy", &u)["Power usage"]; v.StringVal == nil || *v.StringVal != "N/A" || v.IntNumeratorVal != nil || v.IntDenominatorVal != nil {
			t.Errorf("%+v: %+v", u, v)
		}
	}
}

// The times of the first responses. While the driver hangs, the first one is sent after maxStatsDelay at the latest.
func TestStatsPace(t *testing.T) {
	for _, tc := range []struct {
		interval time.Duration
		hangs    bool
		want     [3]time.Duration
	}{
		{10 * time.Second, false, [3]time.Duration{0, 10 * time.Second, 20 * time.Second}},
		{time.Hour, false, [3]time.Duration{0, time.Hour, 2 * time.Hour}},
		{time.Millisecond, false, [3]time.Duration{0, time.Second, 2 * time.Second}},
		{0, false, [3]time.Duration{0, time.Second, 2 * time.Second}},
		{0, true, [3]time.Duration{time.Second, 2 * time.Second, 3 * time.Second}},
		{time.Hour, true, [3]time.Duration{maxStatsDelay, time.Hour + maxStatsDelay, 2*time.Hour + maxStatsDelay}},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newFixture(t, nodeInventory(coretest.GPUs(2)))
			if tc.hangs {
				s.Source.usage = func(ctx context.Context) ([]gpu.Usage, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}
			}
			began := time.Now()
			ch := openStats(t.Context(), t, s, tc.interval)
			for i, want := range tc.want {
				if n := len(instances(t, <-ch)); n != 2 {
					t.Errorf("%d devices", n)
				}
				if at := time.Since(began); at != want {
					t.Errorf("interval %v, hangs %t: response %d after %v, want %v", tc.interval, tc.hangs, i, at, want)
				}
			}
		})
	}
}

func TestStatsSurviveFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newFixture(t, nodeInventory(coretest.GPUs(1)))
		ch := openStats(t.Context(), t, s, time.Second)
		<-ch
		s.Source.SetUsage(nil, errors.New("broken"))
		<-ch // may be of the time before
		for range 5 {
			if v := instances(t, <-ch)[gpuID(0)].Summary; v.StringVal == nil {
				t.Errorf("got %+v without usage", v)
			}
		}
		s.Source.SetUsage([]gpu.Usage{usage(0)}, nil)
		<-ch
		if v := instances(t, <-ch)[gpuID(0)].Summary; v.IntNumeratorVal == nil {
			t.Errorf("not resumed: %+v", v)
		}
		if n := len(s.Log.Lines()); n != 2 {
			t.Errorf("%d lines were logged, want one for each change:\n%q", n, s.Log.Lines())
		}
	})
}

// Nomad shows the previous statistics if a response has no groups, so groups that lost all their devices are sent empty.
func TestStatsOfRemovedDevices(t *testing.T) {
	two := coretest.GPUs(2)
	two.Devices[1].Model = "NVIDIA A2"
	type step struct {
		inv  *inventory.Allocatable
		want []string // type/name:devices
	}
	unloaded := nodeInventory(gpu.NoDriver(gpu.DriverAbsent, "unloaded"))
	for name, steps := range map[string][]step{
		"models": {
			{nodeInventory(two), []string{"gpu/" + h100 + ":1", "gpu/NVIDIA A2:1"}},
			{nodeInventory(coretest.GPUs(1)), []string{"gpu/" + h100 + ":1"}},
			{unloaded, []string{"gpu/" + h100 + ":0"}},
			{unloaded, []string{"gpu/" + h100 + ":0"}},
		},
		"types with one name": {
			{inventoryUnder(mixedPolicy, coretest.GPUs(8)), []string{"gpu/" + h100 + ":2", "gpu-shared/" + h100 + ":12", "gpu-mps/" + h100 + ":4"}},
			{unloaded, []string{"gpu/" + h100 + ":0", "gpu-shared/" + h100 + ":0", "gpu-mps/" + h100 + ":0"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newFixture(t, steps[0].inv)
				ch := openStats(t.Context(), t, s, time.Second)
				for i, step := range steps {
					s.Source.Set(step.inv)
					if i > 0 {
						<-ch // may be of the time before
					}
					r := <-ch
					var got []string
					for _, g := range r.Groups {
						if g.InstanceStats == nil {
							t.Errorf("step %d: %s has no InstanceStats", i, g.Name)
						}
						got = append(got, fmt.Sprintf("%s/%s:%d", g.Type, g.Name, len(g.InstanceStats)))
					}
					if instances(t, r); !slices.Equal(got, step.want) {
						t.Errorf("step %d: got %v, want %v", i, got, step.want)
					}
				}
			})
		})
	}
}

// The shares of a GPU have the usage and the health of the GPU.
func TestStatsOfShares(t *testing.T) {
	s := newFixture(t, sharedGPUs(2, 3, lost(1)))
	s.Source.SetUsage([]gpu.Usage{usage(0)}, nil)
	r := receive(t, openStats(t.Context(), t, s, time.Hour))
	if len(r.Groups) != 1 || r.Groups[0].Type != typeTimeSlicing || r.Groups[0].Name != h100 {
		t.Fatalf("%+v", r.Groups)
	}
	all := instances(t, r)
	if len(all) != 6 {
		t.Errorf("%d devices", len(all))
	}
	for n := range 3 {
		for i, want := range map[int]*structs.StatValue{0: {IntNumeratorVal: new(int64(97))}, 1: {StringVal: new("N/A")}} {
			d := all[shareID(i, n)]
			got := d.Stats.Attributes["GPU utilization"]
			got.Unit, got.Desc = "", ""
			checkEqual(t, shareID(i, n), want, got)
			if healthy := strings.HasPrefix(*d.Stats.Attributes[healthKey].StringVal, "healthy"); healthy != (i == 0) {
				t.Errorf("%s: %s", shareID(i, n), *d.Stats.Attributes[healthKey].StringVal)
			}
		}
	}
}
