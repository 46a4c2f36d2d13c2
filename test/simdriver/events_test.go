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
	of(set.Wait(0)).returns(t, "wait", nvml.ERROR_TIMEOUT)
	ok(t, d.m.XID(0, 79))
	ok(t, d.m.XID(0, 94, simdriver.At{GI: 3, CI: 0}))
	ok(t, d.m.XID(0, 95, simdriver.At{GI: 4, CI: simdriver.WholeInstance}))
	for _, expected := range []nvml.EventData{
		{EventData: 79, GpuInstanceId: nowhere, ComputeInstanceId: nowhere},
		{EventData: 94, GpuInstanceId: 3, ComputeInstanceId: 0},
		{EventData: 95, GpuInstanceId: 4, ComputeInstanceId: nowhere},
	} {
		e := of(set.Wait(1000)).get(t, "wait")
		expected.Device, expected.EventType = e.Device, nvml.EventTypeXidCriticalError
		same(t, "event", e, expected)
		same(t, "device", e.Device, d.gpu(0))
	}
	of(set.Wait(0)).returns(t, "wait", nvml.ERROR_TIMEOUT)
	want(t, "free", set.Free(), nvml.SUCCESS)
}

func TestRegistrationIsAllOrNothing(t *testing.T) {
	d := open(t, "consumer")
	of(d.gpu(0).GetSupportedEventTypes()).is(t, "supported", 0x18)
	set := d.set(0)
	both := d.gpu(0).RegisterEvents(nvml.EventTypeXidCriticalError|nvml.EventTypeDoubleBitEccError, set)
	want(t, "register", both, nvml.ERROR_NOT_SUPPORTED)
	same(t, "violations", len(violations(t, d.m)), 1)
	ok(t, d.m.XID(0, 79))
	of(set.Wait(0)).returns(t, "wait", nvml.ERROR_TIMEOUT)
}

// The wait sleeps in the kernel until the event, and wakes soon after it.
func TestWaitWakesOnEvent(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0, 1, 2, 3)
	var took []time.Duration
	for i := range uint64(20) {
		awake := make(chan time.Time, 1)
		done := begin(func() nvml.Return {
			_, code := set.Wait(10_000)
			awake <- time.Now()
			return code
		})
		d.entered("nvmlEventSetWait_v2", i+1)
		start := time.Now()
		ok(t, d.m.XID(2, 79))
		want(t, "wait", <-done, nvml.SUCCESS)
		took = append(took, (<-awake).Sub(start)) // the append itself included
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
	wait := beginWait(set, 10_000)
	ok(t, d.m.Lose(3))
	want(t, "wait", <-wait, nvml.ERROR_GPU_IS_LOST)
	of(set.Wait(1)).returns(t, "wait again: reported once", nvml.ERROR_TIMEOUT)
	of(d.gpu(0).GetUUID()).returns(t, "another GPU", nvml.SUCCESS)
	wait = beginWait(set, 10_000)
	ok(t, d.m.Unload())
	want(t, "wait across an unload", <-wait, nvml.ERROR_DRIVER_NOT_LOADED)
	ok(t, d.m.Load())
}

func TestWaitThatFailsAndHangs(t *testing.T) {
	d := open(t, "h100x8")
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	wait := beginWait(set, 10_000)
	ok(t, d.m.Fail(simdriver.All, "nvmlEventSetWait", "UNKNOWN", 1))
	want(t, "wait", <-wait, nvml.ERROR_UNKNOWN)
	ok(t, d.m.Hang(simdriver.All, "nvmlEventSetWait"))
	wait = beginWait(set, 1)
	d.entered("nvmlEventSetWait_v2", 2)
	of(d.gpu(0).GetUUID()).returns(t, "another call meanwhile", nvml.SUCCESS)
	select {
	case code := <-wait:
		t.Errorf("did not hang: %v", code)
	default:
	}
	ok(t, d.m.Heal())
	want(t, "wait after heal", <-wait, nvml.ERROR_TIMEOUT)
}

func TestMIGChangeIsAnEvent(t *testing.T) {
	d := open(t, "a100-mig")
	set := d.set(nvml.EventMigConfigChange, 0)
	ok(t, d.m.SetMIG(0, "3g.40gb", "2g.20gb"))
	same(t, "type", of(set.Wait(1000)).get(t, "wait").EventType, nvml.EventMigConfigChange)
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

// A set with both kinds of events returns them in their order by nvmlEventSetWait_v3, with the contexts of the latest.
func TestOperationalEvents(t *testing.T) {
	text, err := simdriver.With615("h100x8")
	ok(t, err)
	d := initialise(t, simdriver.StartText(t, text))
	set := d.set(nvml.EventTypeXidCriticalError, 0)
	config := nvml.GpuOperationalEventConfig_v1{MinSeverity: uint32(nvml.OPERATIONAL_EVENT_SEVERITY_CORRECTED)}
	for i, b := range []byte(d.m.UUID(0)) {
		config.Uuid[i] = int8(b)
	}
	of(set.GetContextCount_v1()).returns(t, "no event so far", nvml.ERROR_NOT_FOUND)
	want(t, "register", set.RegisterGpuOperationalEvents_v1(&config), nvml.SUCCESS)
	ok(t, d.m.Operational(0, "severity=10")) // below the threshold
	ok(t, d.m.Operational(1, "severity=40")) // not registered
	ok(t, d.m.Operational(0, "severity=40", "module=GSP", "code=7", "context", "xid=79"))
	ok(t, d.m.XID(0, 79))
	e := of(set.Wait_v3(0)).get(t, "wait")
	if e.DataType != uint32(nvml.EVENT_DATA_TYPE_GPU_OPERATIONAL_EVENT) || e.Severity != 40 || e.ModuleEventCode != 7 || e.EventType != 0 {
		t.Errorf("%+v", e)
	}
	same(t, "contexts", of(set.GetContextCount_v1()).get(t, "count").Count, uint32(2))
	of(set.GetGpuOperationalEventContextLegacyXid_v1(0)).returns(t, "another context", nvml.ERROR_NOT_FOUND)
	of(set.GetGpuOperationalEventContextLegacyXid_v1(1)).is(t, "XID", 79)
	of(set.GetGpuOperationalEventContextLegacyXid_v1(2)).returns(t, "out of range", nvml.ERROR_INVALID_ARGUMENT)
	e = of(set.Wait_v3(0)).get(t, "wait")
	if e.DataType != uint32(nvml.EVENT_DATA_TYPE_NVML_EVENT) || e.EventData != 79 || e.GpuInstanceId != nowhere {
		t.Errorf("%+v", e)
	}
	same(t, "contexts", of(set.GetContextCount_v1()).get(t, "count").Count, uint32(0))
	of(set.Wait_v3(0)).returns(t, "wait", nvml.ERROR_TIMEOUT)
}
