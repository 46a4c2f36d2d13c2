package main

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/tandem-gpu/tandem/internal/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Who has let the driver go for maintenance does not take it back because the configuration changes.
func TestMaintenanceOutlivesAReload(t *testing.T) {
	t.Parallel()
	m, k, c := simdriver.StartParallel(t, "t4"), startKubelet(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir=")...)
	a.awaitHealthy(k, 1)
	a.said("msg=registered")
	a.signal(control.QuiesceSignal)
	a.awaitHealthy(k, 0)
	a.reload(c, header+"flags: {plugin: {passDeviceSpecs: true}}", restarts)
	a.awaitMany("msg=listening", 2)
	a.awaitMany("msg=registered", 2)
	a.metrics(`state="released"`)
	if all, healthy := k.Capacity(gpuResource); all != 1 || healthy != 0 {
		t.Errorf("%d GPUs are listed, %d of them as healthy", all, healthy)
	}
	a.signal(control.ResumeSignal)
	a.awaitHealthy(k, 1)
}

// Where the configuration is may hang: then nothing changes until it is there, and the end does not wait for it.
func TestConfigurationThatHangs(t *testing.T) {
	t.Parallel()
	m, k, dir, c := simdriver.StartParallel(t, "t4"), startKubelet(t), shortDir(t), newConfigFile(t, header)
	a := start(t, append(on(m.Root, k), "--config-file="+c.path, "--state-dir="+dir)...)
	a.awaitHealthy(k, 1)
	fifo := func() { // opening it waits for one who writes (fifo(7))
		if err := errors.Join(os.Remove(c.path), syscall.Mkfifo(c.path, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	fifo()
	a.signal(syscall.SIGHUP)
	if _, err := k.Allocate(a.ctx, gpuResource, m.UUID(0)); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(c.path, []byte(header), 0); err != nil { // comes back when it is read
		t.Fatal(err)
	}
	a.said(unchanged)
	a.signal(syscall.SIGHUP)
	a.endsWith(syscall.SIGTERM, k, dir, false)
}
