package eviction_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/gpu"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/eviction"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

// node is a node of these tests, in a bubble. Checks are made every ten seconds.
type node struct {
	*testing.T
	devices *watch.Value[[]kubeapi.Device]
	file    string
	perHour int
	checks  *time.Duration // between them; 0 = none
	log     logbuffer.Buffer
	*eviction.Evictions
	stop func()
}

func withNode(t *testing.T, perHour int, test func(*node)) {
	t.Helper()
	folder := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		every := 10 * time.Second
		n := &node{T: t, devices: watch.NewValue[[]kubeapi.Device](nil), file: filepath.Join(folder, "dra", "evictions.json"), perHour: perHour, checks: &every}
		n.start()
		test(n)
		n.stop()
	})
}

func (n *node) start() {
	began := time.Now()
	ctx, cancel := context.WithCancel(n.Context())
	n.Evictions = eviction.New(eviction.Options{
		Devices: n.devices, PerHour: n.perHour, File: n.file, Log: slog.New(slog.NewTextHandler(&n.log, nil)),
		Checks: func() uint64 {
			if *n.checks == 0 {
				return 0
			}
			return uint64(time.Since(began) / *n.checks) //nolint:gosec // not negative
		},
	})
	done := make(chan error, 1)
	go func() { done <- n.Evictions.Run(ctx) }()
	n.stop = func() {
		cancel()
		if err := <-done; err != nil {
			n.Error(err)
		}
	}
}

func (n *node) restart() { n.stop(); n.start() }

// broken sets which of eight GPUs are broken; a claim has each, but for those in free.
func (n *node) broken(which []int, free ...int) {
	all := []kubeapi.Device{}
	for i := range 8 {
		id, none := string(id(i)), ""
		d := kubeapi.Device{
			Name: id, Held: !slices.Contains(free, i),
			Attributes: map[string]kubeapi.DeviceAttribute{"uuid": {String: &id}, "parentUUID": {String: &none}},
		}
		if slices.Contains(which, i) {
			d.Taints = []kubeapi.DeviceTaint{{Key: "gpu.nvidia.com/xid", Value: "79", Effect: kubeapi.NoExecute}}
		}
		all = append(all, d)
	}
	n.devices.Store(all)
}

func id(i int) gpu.DeviceID { return gpu.DeviceID(fmt.Sprintf("GPU-%d", i)) }

func (n *node) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// want checks which GPUs are evicted.
func (n *node) want(when string, which ...int) {
	n.Helper()
	want := map[gpu.DeviceID]bool{}
	for _, i := range which {
		want[id(i)] = true
	}
	if got := n.GPUs().Load(); !maps.Equal(got, want) {
		n.Errorf("%s: %v are evicted, want %v\n%s", when, got, want, n.log.String())
	}
}

var six = []int{2, 3, 4, 5, 6, 7}

// An agent that is shown six GPUs as broken right after its start evicts none of their work within 30 seconds, and that of one within the hour,
// and of another one in each later hour. A restart of the agent starts no new hour.
func TestAtMostOneGPUInAnHour(t *testing.T) {
	withNode(t, 1, func(n *node) {
		n.broken(six)
		n.after(29 * time.Second)
		n.want("after 29 s")
		n.after(3 * time.Second)
		n.want("after 32 s", 2)
		for range 5 {
			n.after(10 * time.Minute)
			n.restart()
			n.after(5 * time.Second)
			n.want("within the hour", 2)
		}
		n.after(10 * time.Minute)
		n.want("after an hour", 2, 3)
		n.after(time.Hour + time.Second)
		n.want("after two hours", 2, 3, 4)
		if text := n.log.String(); strings.Count(text, "Kubernetes deletes the pods") < 3 || !strings.Contains(text, `gpu=GPU-2 cause="gpu.nvidia.com/xid=79"`) || !strings.Contains(text, "evictions-per-hour=1") {
			t.Error(text)
		}
	})
}

// Another limit is another number.
func TestAnotherLimit(t *testing.T) {
	withNode(t, 4, func(n *node) {
		n.broken(six)
		n.after(40 * time.Second)
		n.want("after 40 s", 2, 3, 4, 5)
		n.after(time.Hour)
		n.want("an hour later", six...)
	})
}

// What was shown for a moment, or before two more checks agree, evicts nothing; a GPU that is broken again starts anew, and counts again.
func TestReadingsHaveToAgree(t *testing.T) {
	withNode(t, 1, func(n *node) {
		for range 10 {
			n.broken(six)
			n.after(25 * time.Second)
			n.broken(nil)
			n.after(time.Minute)
		}
		n.want("after moments")
		*n.checks = 0
		n.broken([]int{2})
		n.after(time.Hour)
		n.want("without checks")
		*n.checks = 5 * time.Minute
		n.restart()
		n.after(9 * time.Minute)
		n.want("after one check")
		n.after(3 * time.Minute)
		n.want("after two checks", 2)
		n.broken(nil)
		n.after(time.Second)
		n.want("healthy again")
		n.broken([]int{2})
		n.after(40 * time.Minute)
		n.want("broken again")
		n.after(30 * time.Minute)
		n.want("after the hour", 2)
	})
}

// A GPU that no claim has costs nothing of the limit.
func TestFreeGPUs(t *testing.T) {
	withNode(t, 1, func(n *node) {
		n.broken(six, 2, 3)
		n.after(time.Minute)
		n.want("the first that a claim has", 4)
		n.broken(six, 4)
		n.after(time.Minute)
		n.want("its claims have ended", 4)
	})
}

// A record that can't be read counts as full, one that can't be written lets nothing be evicted, and one of the future counts from now.
func TestRecordOnDisk(t *testing.T) {
	withNode(t, 1, func(n *node) {
		write := func(text string) {
			t.Helper()
			if err := os.MkdirAll(filepath.Dir(n.file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(n.file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		n.broken([]int{2})
		for what, text := range map[string]string{"a broken file": "{", "the file of a later agent": `{"version":2,"evictions":[]}`} {
			n.stop()
			write(text)
			n.start()
			n.after(50 * time.Minute)
			n.want("with " + what)
			n.after(11 * time.Minute)
			n.want("an hour later", 2)
		}

		n.stop()
		write(`{"version":1,"evictions":[{"gpu":"GPU-7","cause":"x","at":"2099-01-01T00:00:00Z","ended":true}]}`)
		n.start()
		n.after(50 * time.Minute)
		n.want("with a record of the future")
		n.after(11 * time.Minute)
		n.want("an hour later", 2)

		n.stop()
		if err := os.RemoveAll(filepath.Dir(n.file)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Dir(n.file), nil, 0o600); err != nil { // no folder
			t.Fatal(err)
		}
		n.start()
		n.after(2 * time.Hour)
		n.want("without a folder")
		if err := os.Remove(filepath.Dir(n.file)); err != nil {
			t.Fatal(err)
		}
		n.after(time.Minute)
		n.want("with it", 2)
	})
}

// A GPU that recovers while the disk fails, and is broken again, is not evicted before that is confirmed again.
func TestRecoveryThatIsNotOnDisk(t *testing.T) {
	withNode(t, 2, func(n *node) {
		n.broken([]int{2})
		n.after(time.Minute)
		n.want("broken", 2)
		aside := n.file + ".aside"
		for _, err := range []error{os.Rename(n.file, aside), os.Mkdir(n.file, 0o755)} { // a folder is in the place of the file
			if err != nil {
				t.Fatal(err)
			}
		}
		n.broken(nil)
		n.after(time.Minute)
		n.want("recovered")
		n.broken([]int{2})
		n.after(time.Second)
		n.want("broken again")
		for _, err := range []error{os.Remove(n.file), os.Rename(aside, n.file)} {
			if err != nil {
				t.Fatal(err)
			}
		}
		n.after(2 * time.Minute)
		n.want("the disk works", 2)
	})
}
