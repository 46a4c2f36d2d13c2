package simdriver_test

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

const nowhere = 0xFFFFFFFF

func TestEventsAreNotRetroactive(t *testing.T) {
	d := open(t, "h100x8")
	ok(t, d.m.XID(0, 31))
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	ok(t, d.m.XID(1, 48)) // not registered
	ok(t, d.m.Event(0, simdriver.EventDoubleBitECC, 0))
	_, ret := set.Wait(0)
	want(t, "wait", ret, nvml.ERROR_TIMEOUT)
	ok(t, d.m.XID(0, 79))
	ok(t, d.m.XID(0, 94, simdriver.At{GI: 3, CI: 0}))
	ok(t, d.m.XID(0, 95, simdriver.At{GI: 4, CI: simdriver.WholeInstance}))
	for _, expected := range []nvml.EventData{
		{EventData: 79, GpuInstanceId: nowhere, ComputeInstanceId: nowhere},
		{EventData: 94, GpuInstanceId: 3, ComputeInstanceId: 0},
		{EventData: 95, GpuInstanceId: 4, ComputeInstanceId: nowhere},
	} {
		e, ret := set.Wait(1000)
		want(t, "wait", ret, nvml.SUCCESS)
		expected.Device, expected.EventType = e.Device, nvml.EventTypeXidCriticalError
		same(t, "event", e, expected)
		same(t, "device", e.Device, d.gpu(0))
	}
	_, ret = set.Wait(0)
	want(t, "wait", ret, nvml.ERROR_TIMEOUT)
	want(t, "free", set.Free(), nvml.SUCCESS)
}

func TestRegistrationIsAllOrNothing(t *testing.T) {
	d := open(t, "consumer")
	mask, ret := d.gpu(0).GetSupportedEventTypes()
	want(t, "supported", ret, nvml.SUCCESS)
	same(t, "supported", mask, 0x18)
	set := d.set(0)
	ret = d.gpu(0).RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError, set)
	want(t, "register", ret, nvml.ERROR_NOT_SUPPORTED)
	same(t, "violations", len(violations(t, d.m)), 1)
	ok(t, d.m.XID(0, 79))
	_, ret = set.Wait(0)
	want(t, "wait", ret, nvml.ERROR_TIMEOUT)
}

// The wait sleeps in the kernel until the event, and wakes soon after it.
func TestWaitWakesOnEvent(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0, 1, 2, 3)
	type result struct {
		ret nvml.Return
		at  time.Time
	}
	var took []time.Duration
	for i := range uint64(20) {
		done := make(chan result)
		go func() { _, ret := set.Wait(10_000); done <- result{ret, time.Now()} }()
		until(t, func() bool { // the waiter has entered
			calls, err := d.m.Calls()
			ok(t, err)
			return calls["nvmlEventSetWait_v2"] > i
		})
		start := time.Now()
		ok(t, d.m.XID(2, 79))
		r := <-done
		want(t, "wait", r.ret, nvml.SUCCESS)
		took = append(took, r.at.Sub(start)) // the append itself included
	}
	slices.Sort(took)
	t.Logf("from before the append to awake: median %v, worst %v", took[10], took[19])
	if took[10] > 5*time.Millisecond {
		t.Errorf("median wake-up %v, want under 5ms", took[10])
	}
}

func TestWaitEndsWithTheGPU(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0, 3)
	done := make(chan nvml.Return)
	wait := func() { _, ret := set.Wait(10_000); done <- ret }
	go wait()
	ok(t, d.m.Lose(3))
	want(t, "wait", <-done, nvml.ERROR_GPU_IS_LOST)
	_, ret := set.Wait(1)
	want(t, "wait again: told once", ret, nvml.ERROR_TIMEOUT)
	dev, ret := d.DeviceGetHandleByIndex(0)
	want(t, "handle", ret, nvml.SUCCESS)
	_, ret = dev.GetUUID()
	want(t, "another GPU", ret, nvml.SUCCESS)
	go wait()
	ok(t, d.m.Unload())
	want(t, "wait across an unload", <-done, nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Load())
}

func TestWaitFailsAndHangsAsTold(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	done := make(chan nvml.Return)
	wait := func(ms uint32) { _, ret := set.Wait(ms); done <- ret }
	go wait(10_000)
	ok(t, d.m.Fail(simdriver.All, "nvmlEventSetWait", "UNKNOWN", 1))
	want(t, "wait", <-done, nvml.ERROR_UNKNOWN)
	ok(t, d.m.Hang(simdriver.All, "nvmlEventSetWait"))
	go wait(1)
	until(t, func() bool {
		calls, err := d.m.Calls()
		ok(t, err)
		return calls["nvmlEventSetWait_v2"] > 1
	})
	_, ret := d.gpu(0).GetUUID()
	want(t, "another call meanwhile", ret, nvml.SUCCESS)
	select {
	case ret := <-done:
		t.Errorf("did not hang: %v", ret)
	default:
	}
	ok(t, d.m.Heal())
	want(t, "wait after heal", <-done, nvml.ERROR_TIMEOUT)
}

func TestMIGChangeIsAnEvent(t *testing.T) {
	d := open(t, "a100-mig")
	set := d.set(nvml.EventMigConfigChange, 0)
	ok(t, d.m.SetMIG(0, "3g.40gb", "2g.20gb"))
	e, ret := set.Wait(1000)
	want(t, "wait", ret, nvml.SUCCESS)
	same(t, "type", e.EventType, nvml.EventMigConfigChange)
}

func TestSystemEvents(t *testing.T) {
	d := open(t, "h200")
	create := nvml.SystemEventSetCreateRequest{Version: nvml.STRUCT_VERSION(nvml.SystemEventSetCreateRequest_v1{}, 1)}
	want(t, "create", d.SystemEventSetCreate(&create), nvml.SUCCESS)
	register := nvml.SystemRegisterEventRequest{
		Version:    nvml.STRUCT_VERSION(nvml.SystemRegisterEventRequest_v1{}, 1),
		Set:        create.Set,
		EventTypes: nvml.SystemEventTypeGpuDriverBind | nvml.SystemEventTypeGpuDriverUnbind,
	}
	want(t, "register", d.SystemRegisterEvents(&register), nvml.SUCCESS)
	ok(t, d.m.Unload())
	ok(t, d.m.Load())

	// go-nvml hands the request to C as it is: what it points at must be pinned.
	var pin runtime.Pinner
	defer pin.Unpin()
	data := make([]nvml.SystemEventData_v1, 4)
	pin.Pin(&data[0])
	wait := nvml.SystemEventSetWaitRequest{
		Version: nvml.STRUCT_VERSION(nvml.SystemEventSetWaitRequest_v1{}, 1), Set: create.Set,
		Timeoutms: 1000, Data: &data[0], DataSize: uint32(len(data)),
	}
	want(t, "wait", d.SystemEventSetWait(&wait), nvml.SUCCESS)
	same(t, "events", wait.NumEvent, 2)
	same(t, "first", data[0], nvml.SystemEventData_v1{EventType: nvml.SystemEventTypeGpuDriverUnbind, GpuId: 0x0400})
	same(t, "second", data[1], nvml.SystemEventData_v1{EventType: nvml.SystemEventTypeGpuDriverBind, GpuId: 0x0400})
	wait.Timeoutms = 0
	want(t, "wait again", d.SystemEventSetWait(&wait), nvml.ERROR_TIMEOUT)
	free := nvml.SystemEventSetFreeRequest{Version: nvml.STRUCT_VERSION(nvml.SystemEventSetFreeRequest_v1{}, 1), Set: create.Set}
	want(t, "free", d.SystemEventSetFree(&free), nvml.SUCCESS)
}
