package storm

import (
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// table is the descriptor table of a process, which can be kept full: nothing can be opened then, as where something leaks.
type table struct {
	mu    sync.Mutex
	held  []int
	was   syscall.Rlimit
	ended chan struct{} // closed to have it free again; nil = it is
}

// spare is how many descriptors above those in use the limit is set to.
const spare = 4

// fill fills the table, and keeps what is closed from then on from being of use.
func (t *table) fill() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended != nil || syscall.Getrlimit(syscall.RLIMIT_NOFILE, &t.was) != nil {
		return
	}
	highest := 2
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			highest = max(highest, n)
		}
	}
	lowered := t.was
	lowered.Cur = uint64(highest + 1 + spare)
	if syscall.Setrlimit(syscall.RLIMIT_NOFILE, &lowered) != nil {
		return
	}
	t.take()
	ended := make(chan struct{})
	t.ended = ended
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				t.mu.Lock()
				if t.ended == ended {
					t.take()
				}
				t.mu.Unlock()
			case <-ended:
				return
			}
		}
	}()
}

// take opens what can be opened.
func (t *table) take() {
	for {
		fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
		if err != nil {
			return
		}
		t.held = append(t.held, fd)
	}
}

// free ends it.
func (t *table) free() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.ended == nil {
		return
	}
	close(t.ended)
	t.ended = nil
	for _, fd := range t.held {
		_ = syscall.Close(fd) // of /dev/null
	}
	t.held = nil
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &t.was) // it raises what was lowered
}
