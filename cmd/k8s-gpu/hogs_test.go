package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Whoever reaches the port can open connections. The DaemonSet's limit of memory is 96 MiB, and a probe that is not
// answered in three seconds counts as failed: neither may end the agent.
func TestClientsThatHoldThePortDoNotEndIt(t *testing.T) {
	t.Parallel()
	m, k := simdriver.StartParallel(t, "a100x16-mig"), startKubelet(t)
	a := start(t, append(on(m.Root, k), "--mig-strategy=mixed")...)
	a.awaitReady("offered to the kubelet")
	address := a.said(`http=(\S+)`)
	_, page := a.get("/metrics")
	t.Logf("/metrics has %d bytes, the agent %d MiB", len(page), a.peak()>>20)

	ctx, cancel := context.WithCancel(t.Context())
	var hogs sync.WaitGroup
	defer hogs.Wait()
	defer cancel()
	kinds := []string{
		"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /inventory HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /metrics HTTP/1.1\r\nHost: a\r\nX-A: ", // and never the rest
		"",
	}
	for i := range 400 {
		hogs.Go(func() { hold(ctx, address, kinds[i%len(kinds)]) })
	}
	probe := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for end := time.Now().Add(12 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
			began := time.Now()
			response, err := probe.Get("http://" + address + path)
			if err != nil {
				t.Fatalf("%s after %v: %v", path, time.Since(began), err)
			}
			body, err := io.ReadAll(response.Body)
			_ = response.Body.Close()
			if err != nil || response.StatusCode != http.StatusOK || len(body) == 0 {
				t.Errorf("%s: %s, %d bytes, %v", path, response.Status, len(body), err)
			}
		}
	}
	if peak := a.peak(); peak > 64<<20 {
		t.Errorf("the agent took %d MiB", peak>>20)
	} else {
		t.Logf("the agent took %d MiB", peak>>20)
	}
}

// hold connects again and again, sends a request and reads nothing.
func hold(ctx context.Context, address, request string) {
	small := func(_, _ string, c syscall.RawConn) error { // so that little fits into the kernel's buffers
		return c.Control(func(fd uintptr) { _ = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4096) })
	}
	dialer := net.Dialer{Control: small}
	for ctx.Err() == nil {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err != nil {
			continue
		}
		_, _ = io.WriteString(conn, request)
		select {
		case <-time.After(2 * time.Second):
		case <-ctx.Done():
		}
		_ = conn.Close()
	}
}

// peak is the most memory that the agent has had, in bytes.
func (a *testAgent) peak() int {
	a.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.cmd.Process.Pid))
	if err != nil {
		a.Fatal(err)
	}
	kib, err := strconv.Atoi(string(regexp.MustCompile(`VmHWM:\s+(\d+) kB`).FindSubmatch(text)[1]))
	if err != nil {
		a.Fatal(err)
	}
	return kib << 10
}
