package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// kernelLog is a file in place of /dev/kmsg.
type kernelLog struct {
	*testing.T
	path string
	m    *simdriver.Machine
	seq  int // of the latest record
}

// newKernelLog begins as a kernel's log does: with records that concern no GPU.
func newKernelLog(t *testing.T, m *simdriver.Machine) *kernelLog {
	t.Helper()
	l := &kernelLog{T: t, path: filepath.Join(t.TempDir(), "kmsg"), m: m, seq: 70}
	l.write("nvidia: loading out-of-tree module taints kernel.")
	return l
}

// xid logs an XID of the GPU in a slot.
func (l *kernelLog) xid(slot, code int) {
	l.Helper()
	pci, err := l.m.Get(slot, "pci")
	if err != nil {
		l.Fatal(err)
	}
	l.write(fmt.Sprintf("NVRM: Xid (PCI:%s): %d, a fault", strings.TrimSuffix(pci, ".0"), code))
}

// write appends a record, some minutes after the one before.
func (l *kernelLog) write(message string) {
	l.Helper()
	l.seq++
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		l.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := fmt.Fprintf(f, "4,%d,%d000000,-;%s\n", l.seq, 300*l.seq, message); err != nil {
		l.Fatal(err)
	}
}

// end ends the agent with SIGTERM.
func (a *testAgent) end() {
	a.Helper()
	a.signal(syscall.SIGTERM)
	if code := a.ended(); code != 0 {
		a.Fatalf("exit code %d", code)
	}
}

// A line that waits for NVML's event when the agent ends is read by the next one, and counts once if NVML told of it.
func TestXIDsLoggedRightBeforeTheEnd(t *testing.T) {
	t.Parallel()
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	log := newKernelLog(t, m)
	args := append(on(m.Root, k), "--state-dir="+dir, "--kernel-log="+log.path)
	a := start(t, args...)
	a.awaitHealthy(k, 8)
	if err := m.XID(3, 95); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	log.xid(3, 95)
	log.xid(4, 119)
	a.end()
	a = start(t, args...)
	a.awaitHealthy(k, 6)
	a.metrics(`tandem_xid_errors_total{gpu="`+m.UUID(3)+`",xid="95"} 1`, `tandem_xid_errors_total{gpu="`+m.UUID(4)+`",xid="119"} 1`)
}

// A reload that starts the agent anew in the same process loses no line, with a state directory or without.
func TestXIDsLoggedDuringAReload(t *testing.T) {
	t.Parallel()
	for _, dir := range []string{shortDir(t), ""} {
		m, k, c := simdriver.StartParallel(t, "h100x8"), startKubelet(t), newConfigFile(t, header)
		log := newKernelLog(t, m)
		log.xid(1, 119)
		a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir, "--kernel-log="+log.path)...)
		a.awaitHealthy(k, 8)
		c.write(header + "flags: {plugin: {passDeviceSpecs: true}}")
		a.signal(syscall.SIGHUP)
		a.said("stopped")
		log.xid(5, 119)
		a.awaitHealthy(k, 7)
		a.metrics(`tandem_xid_errors_total{gpu="`+m.UUID(1)+`",xid="119"} 0`, `tandem_xid_errors_total{gpu="`+m.UUID(5)+`",xid="119"} 1`)
	}
}

// What the kernel logs of a GPU before the driver can be asked counts with the first reading, and what it logs of no GPU
// that is listed is said once and counted.
func TestXIDsOfGPUsThatAreNotListed(t *testing.T) {
	t.Parallel()
	m, k, dir := simdriver.StartParallel(t, "h100x8"), startKubelet(t), shortDir(t)
	log := newKernelLog(t, m)
	if err := m.Unload(); err != nil {
		t.Fatal(err)
	}
	a := start(t, append(on(m.Root, k), "--state-dir="+dir, "--kernel-log="+log.path)...)
	a.said("driver absent")
	a.await("the kernel log is followed", func() bool { _, page := a.get("/metrics"); return strings.Contains(page, `source="kernel_log"} 1`) })
	log.xid(2, 119)
	time.Sleep(3 * time.Second) // longer than a line waits for NVML's event
	if err := m.Load(); err != nil {
		t.Fatal(err)
	}
	a.awaitHealthy(k, 7)
	for range 3 {
		log.write("NVRM: Xid (PCI:0000:fe:00): 79, GPU has fallen off the bus.")
		time.Sleep(2500 * time.Millisecond)
	}
	a.metrics(`tandem_xid_errors_unlisted_total 3`, `tandem_xid_errors_total{gpu="`+m.UUID(2)+`",xid="119"} 1`)
	says(t, dir, "the kernel log has XID 79 of 0000:fe:00.0, where no GPU is listed", "inspect")
	if n := a.times(`without a listed GPU" pci=0000:fe:00.0 xid=79`); n != 1 {
		t.Errorf("said %d times", n)
	}
}
