package agents

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
)

// Any client that reaches the port can open connections. The DaemonSet's memory limit is 96 MiB, and a probe that gets no answer
// in three seconds has failed: neither may happen.
func TestClientsThatHoldConnections(t *testing.T) {
	t.Parallel()
	a := newAgent(t, k8sGPU, "a100x16-mig", map[string]any{"mig_strategy": "mixed"})
	a.start()
	a.ready(http.StatusOK, "offered to the kubelet")
	_, page := a.get("/metrics")
	t.Logf("/metrics has %d bytes, the agent %d MiB", len(page), a.peakMemory()>>20)

	ctx, cancel := context.WithCancel(t.Context())
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	requests := []string{
		"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /inventory HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /metrics HTTP/1.1\r\nHost: a\r\nX-A: ", // and never the rest
		"",
	}
	for i := range 400 {
		clients.Go(func() { holdConnections(ctx, a.address(), requests[i%len(requests)]) })
	}
	probe := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	for end := time.Now().Add(12 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
			began := time.Now()
			response, err := probe.Get("http://" + a.address() + path)
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
	if peak := a.peakMemory(); peak > 64<<20 {
		t.Errorf("the agent took %d MiB", peak>>20)
	} else {
		t.Logf("the agent took %d MiB", peak>>20)
	}
}

// holdConnections connects again and again, sends a request and reads nothing.
func holdConnections(ctx context.Context, address, request string) {
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

var peakRSS = regexp.MustCompile(`VmHWM:\s+(\d+) kB`)

// peakMemory is the most memory that the agent has had, in bytes.
func (a *agent) peakMemory() int {
	a.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", a.cmd.Process.Pid))
	a.must(err)
	kib, err := strconv.Atoi(string(peakRSS.FindSubmatch(text)[1]))
	a.must(err)
	return kib << 10
}
