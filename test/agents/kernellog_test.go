package agents

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// kernelLog is a file in place of /dev/kmsg.
type kernelLog struct {
	*agent
	path string
	seq  int // of the latest record
}

// useKernelLog sets a file as the kernel log. It begins with a record that concerns no GPU.
func (a *agent) useKernelLog() *kernelLog {
	l := &kernelLog{agent: a, path: filepath.Join(a.TempDir(), "kmsg"), seq: 70}
	a.settings["kernel_log"] = l.path
	l.write("nvidia: loading out-of-tree module taints kernel.")
	return l
}

// xid logs an XID of the GPU in a slot.
func (l *kernelLog) xid(slot, code int, text string) {
	l.Helper()
	pci, err := l.driver.Get(slot, "pci")
	l.must(err)
	l.write(fmt.Sprintf("NVRM: Xid (PCI:%s): %d, %s", strings.TrimSuffix(pci, ".0"), code, text))
}

// load logs that the driver was loaded.
func (l *kernelLog) load() {
	l.Helper()
	l.write("NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:14:09 UTC 2025")
}

// write appends a record, some minutes after the one before.
func (l *kernelLog) write(message string) {
	l.Helper()
	l.seq++
	f, err := os.OpenFile(l.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	l.must(err)
	_, err = fmt.Fprintf(f, "4,%d,%d000000,-;%s\n", l.seq, 300*l.seq, message)
	l.must(err, f.Close())
}

// XIDs that NVML does not report come from the kernel log, without the names of processes.
func TestKernelLog(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		log := a.useKernelLog()
		a.start()
		a.healthy(8, 8)
		log.xid(4, 119, "pid=1582259, name=secret, Timeout after 6s of waiting for RPC response from GPU4 GSP!")
		a.healthy(8, 7)
		a.metrics(`tandem_xid_errors_total{gpu="`+a.driver.UUID(4)+`",xid="119"} 1`, `tandem_health_source_up{source="kernel_log"} 1`)
		if d := a.devices()[a.driver.UUID(4)]; !strings.Contains(d.Reason, "XID 119 ") || strings.Contains(d.Reason, "secret") {
			a.Errorf("want the text of the kernel without the process: %+v", d)
		}
		if out, err := a.command("inspect", "--json"); err != nil || !strings.Contains(out, "Timeout after 6s") || strings.Contains(out, "secret") {
			a.Errorf("want the text of the kernel without the process: %v\n%s", err, out)
		}
	})
}

// What the kernel logs while no agent runs, or in its last moments, counts once, when the next one starts. What a load of the driver
// has ended before the first start does not count, and what an operator has cleared does not count again. The first list of the next process has the faults.
func TestXIDsLoggedWhileNoAgentRuns(t *testing.T) {
	t.Parallel()
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			both(t, "h100x8", nil, func(a *agent) {
				log := a.useKernelLog()
				log.xid(1, 119, "a fault")
				log.load()
				a.start()
				a.healthy(8, 8)
				log.xid(4, 119, "a fault")
				a.healthy(8, 7)
				a.prints("cleared", "clear", "--gpu=4")
				a.healthy(8, 8)
				a.xid(3, 95)
				a.healthy(8, 7)
				log.xid(3, 95, "a fault") // which the agent has from the driver
				a.awaitFile(a.history(), `"Code": 95`)
				log.xid(7, 119, "a fault") // which waits for NVML's event when the agent ends
				end(a)
				left := a.kubeletSockets()
				if name == "killed" && a.program == k8sGPU && len(left) != 1 {
					a.Errorf("a killed agent has left the sockets %v", left)
				}
				log.xid(5, 119, "a fault")
				a.start()
				ids, want := a.firstUnhealthy(8), []string{a.driver.UUID(3), a.driver.UUID(5), a.driver.UUID(7)}
				if slices.Sort(want); !slices.Equal(ids, want) {
					a.Errorf("unhealthy in the first list: %v, want %v", ids, want)
				}
				if now := a.kubeletSockets(); slices.ContainsFunc(now, func(path string) bool { return slices.Contains(left, path) }) {
					a.Errorf("sockets %v, the killed agent left %v", now, left)
				}
				a.counts("3:XID_95:1 4:XID_119:1 5:XID_119:1 7:XID_119:1")
				a.metrics(`tandem_health_source_up{source="history"} 1`, `tandem_xid_errors_total{gpu="`+a.driver.UUID(1)+`",xid="119"} 0`,
					`tandem_xid_errors_total{gpu="`+a.driver.UUID(4)+`",xid="119"} 1`, `tandem_xid_errors_total{gpu="`+a.driver.UUID(5)+`",xid="119"} 1`)
				end(a)
				a.start()
				log.xid(6, 119, "a fault")
				a.healthy(8, 4)
				a.counts("3:XID_95:1 4:XID_119:1 5:XID_119:1 6:XID_119:1 7:XID_119:1")
			})
		})
	}
}

// An XID that the kernel logs of a GPU before the driver can be read counts with the first reading. One of no GPU that is listed is
// logged once and counted.
func TestXIDsOfGPUsThatAreNotListed(t *testing.T) {
	both(t, "h100x8", nil, func(a *agent) {
		log := a.useKernelLog()
		a.must(a.driver.Unload())
		a.start()
		a.logs("INFO", "driver absent")
		a.metrics(`source="kernel_log"} 1`)
		log.xid(2, 119, "a fault")
		time.Sleep(3 * time.Second) // longer than a line waits for NVML's event
		a.must(a.driver.Load())
		a.healthy(8, 7)
		for range 3 {
			log.write("NVRM: Xid (PCI:0000:fe:00): 79, GPU has fallen off the bus.")
			time.Sleep(2500 * time.Millisecond)
		}
		a.metrics(`tandem_xid_errors_unlisted_total 3`, `tandem_xid_errors_total{gpu="`+a.driver.UUID(2)+`",xid="119"} 1`)
		a.prints("the kernel log has XID 79 of 0000:fe:00.0, where no GPU is listed", "inspect")
		if n := a.times("pci=0000:fe:00.0"); n != 1 {
			a.Errorf("logged %d times", n)
		}
	})
}
