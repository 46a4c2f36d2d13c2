package storm

import (
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
)

// faultKinds are the faults of a machine with one agent.
func (w *oneAgent) faultKinds() []kind {
	calls, bus, action, driver, kubelet := []string{"calls"}, []string{"bus"}, []string{"action"}, []string{"driver"}, []string{"kubelet"}
	down := [2]time.Duration{0, 1500 * time.Millisecond}
	return []kind{
		{name: "call fails", weight: 14, domains: calls, gpu: true, draw: drawFail, begin: w.failCall, end: w.healCalls},
		{name: "call hangs", noticed: true, weight: 8, domains: calls, gpu: true, hangs: true, draw: drawHang, begin: w.hangCall, end: w.healCalls},
		{name: "call is slow", weight: 8, domains: calls, gpu: true, draw: drawSlow, begin: w.slowCall, end: w.healCalls},

		{name: "lost", noticed: true, weight: 8, domains: bus, gpu: true, begin: w.losing(w.Lose), end: w.restore},
		{name: "unbound", noticed: true, weight: 4, domains: bus, gpu: true, begin: w.losing(w.Unbind), end: w.bind},
		{name: "removed", noticed: true, weight: 4, domains: bus, gpu: true, begin: w.losing(w.removeGPU), end: w.putBack},
		{name: "replaced", weight: 3, domains: bus, gpu: true, begin: w.replace},
		{name: "recovery action", noticed: true, weight: 7, domains: action, gpu: true, draw: drawAction, begin: w.setAction, end: w.clearAction},
		{name: "reset", weight: 4, domains: action, gpu: true, begin: w.reset},
		{name: "handles invalidated", weight: 3, gpu: true, begin: w.disturbing(func(f *fault) error { return w.Invalidate(f.slot) })},
		{name: "repartitioned", weight: 5, domains: bus, gpu: true, mig: true, draw: drawLayout, begin: w.disturbing(w.repartition)},

		{name: "fatal XID", weight: 4, gpu: true, draw: drawXID(fatalXIDs...), begin: w.fatalXID},
		{name: "fatal XID and reset", noticed: true, weight: 4, domains: []string{"bus", "action"}, gpu: true,
			draw: drawXID(fatalXIDs...), begin: w.fatalXID, end: w.resetAfterXID},
		{name: "severe XID", weight: 5, gpu: true, draw: drawXID(48, 62, 64, 79, 95, 120, 156, 158, 171), begin: w.disturbing(w.severeXID)},
		{name: "application XID", weight: 7, gpu: true, draw: drawXID(13, 31, 43, 45, 69), begin: w.sendXID},
		{name: "other XID", weight: 4, gpu: true, draw: drawXID(63, 92, 94, 7, 109, 145, 154, 999, 1234), begin: w.disturbing(w.sendXID)},
		{name: "event", weight: 5, gpu: true, draw: drawEvent, begin: w.sendEvent},
		{name: "many XIDs", weight: 3, gpu: true, draw: drawMany, begin: w.manyXIDs},
		{name: "failed row remap and XID", weight: 3, domains: bus, gpu: true, draw: drawXID(48, 95), begin: w.failRemap, end: w.repairRemap},

		{name: "event calls", weight: 5, domains: driver, draw: drawEventCall, begin: w.callOfAll, end: w.healAll},
		{name: "driver call", weight: 3, domains: driver, driver: true, draw: drawDriverCall, begin: w.callOfAll, end: w.healAll},
		{name: "slow statistics", weight: 4, domains: driver, lasts: [2]time.Duration{time.Second, 3 * time.Second},
			draw: drawSlowStatistics, begin: w.callOfAll, end: w.healAll},
		{name: "clock jumps", weight: 4, draw: drawClockStep, begin: func(f *fault) error { w.ahead.Add(int64(f.took)); return nil }},
		{name: "unloaded", noticed: true, weight: 3, domains: driver, driver: true, begin: w.unload, end: w.load},
		{name: "reloaded", weight: 2, domains: driver, driver: true, begin: w.resetting(func() error { return w.SetDriver(version) })},
		{name: "library hidden", weight: 2, domains: driver, driver: true, begin: w.resetting(w.Hide), end: w.resetting(w.Unhide)},
		{name: "maintenance", noticed: true, weight: 3, domains: driver, driver: true, begin: w.quiesce, end: w.resume},

		{name: "policy changes", weight: 5, domains: bus, gpu: true, policy: true, draw: drawPolicy, begin: w.changePolicy},
		{name: "MPS daemons end", noticed: true, weight: 4, domains: []string{"daemons"}, policy: true, begin: w.stopDaemons, end: w.startDaemons},

		{name: "kubelet stops", weight: 3, domains: kubelet, lasts: down, begin: w.stopKubelet((*kubelettest.Kubelet).Stop), end: w.startKubelet},
		{name: "kubelet crashes", weight: 3, domains: kubelet, lasts: down, begin: w.stopKubelet((*kubelettest.Kubelet).Crash), end: w.startKubelet},
		{name: "kubelet misbehaves", weight: 2, domains: kubelet, draw: drawBehaviour, begin: w.misbehave,
			end: w.changeKubelet(func(k *kubelettest.Kubelet) { k.Behave(kubelettest.Behaviour{}) })},
		{name: "stream ends", weight: 2, domains: kubelet, begin: w.changeKubelet(func(k *kubelettest.Kubelet) { k.EndStream(kubeadapter.GPUResource) })},
		{name: "fingerprint reopened", weight: 3, begin: func(*fault) error { return w.nomad.fingerprint() }},
		{name: "statistics reopened", weight: 3, begin: func(*fault) error { return w.nomad.stats() }},
	}
}

// version is that of the machine's driver.
const version = "570.124.06"

// In place of a return code: the call hangs, or is slow.
const (
	hangs = "hang"
	slow  = "slow"
)

func drawFail(r *rand.Rand, f *fault) {
	f.call, f.code = one(r, gpuCalls...), gpuReturnCode(r)
	if r.IntN(2) == 0 {
		f.count = 1 + r.IntN(4)
	}
}

// drawHang draws a call that hangs: one that is made in each check, or any.
func drawHang(r *rand.Rand, f *fault) { f.call = one(r, "*", "nvmlDeviceGetUUID", one(r, gpuCalls...)) }

func drawSlow(r *rand.Rand, f *fault) {
	f.call, f.took = one(r, gpuCalls...), time.Duration(5+r.IntN(35))*time.Millisecond
	if f.call == "*" {
		f.took = 4 * time.Millisecond
	}
}

func drawAction(r *rand.Rand, f *fault) { f.count = one(r, 1, 1, 2, 3, 4, 6, 99) }

func drawXID(codes ...int) func(*rand.Rand, *fault) {
	return func(r *rand.Rand, f *fault) { f.count = one(r, codes...) }
}

// drawEvent draws a type of event (nvml.h, nvmlEventType): clocks and power, MIG, and those that name a fault.
func drawEvent(r *rand.Rand, f *fault) {
	f.count = one(r, 0x1, 0x2, 0x4, 0x10, 0x80, 0x100, 0x200, 0x400, 0x1000, 0x2000, 0x4000, 0x8000)
}

func drawMany(r *rand.Rand, f *fault) { f.count = 50 + r.IntN(1000) }

func drawLayout(r *rand.Rand, f *fault) { f.count = r.IntN(len(layouts)) }

func drawPolicy(r *rand.Rand, f *fault) { f.count = 1 + r.IntN(4) }

func drawBehaviour(r *rand.Rand, f *fault) { f.count = r.IntN(len(misbehaviours)) }

// drawEventCall draws a fault of the calls about events, which concerns no GPU.
func drawEventCall(r *rand.Rand, f *fault) {
	f.call = one(r, "nvmlEventSetWait", "nvmlEventSetWait", "nvmlEventSetCreate", "nvmlEventSetFree",
		"nvmlSystemEventSetWait", "nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents")
	f.code = gpuReturnCode(r)
	if f.call == "nvmlEventSetWait" && r.IntN(3) == 0 {
		f.code = hangs
	}
}

// drawSlowStatistics draws a call that only the statistics need. It may delay no check.
func drawSlowStatistics(r *rand.Rand, f *fault) {
	f.call, f.code, f.took = one(r, usageCalls...), slow, time.Duration(50+r.IntN(550))*time.Millisecond
}

func drawDriverCall(r *rand.Rand, f *fault) {
	f.call, f.code = one(r, driverCalls...), one(r, append(slices.Clone(returnCodes), hangs, hangs, hangs, hangs, slow)...)
	if f.code == slow {
		f.took = 20 * time.Millisecond
	}
}

// misbehaviours are ways in which a kubelet makes it hard to register.
var misbehaviours = []kubelettest.Behaviour{
	{Refuse: errors.New("not now")},
	{Delay: 700 * time.Millisecond},
	{StreamDelay: 500 * time.Millisecond},
	{NoStream: true},
	{Lag: 300 * time.Millisecond},
}
