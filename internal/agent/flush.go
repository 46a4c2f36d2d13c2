package agent

import (
	"sync"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/core/monitor"
)

// flushNotifier is a store that closes flushed after the first Save that began when the run was stopping: the monitor's last.
type flushNotifier struct {
	monitor.Store
	stopping <-chan struct{} // set before the monitor runs
	flushed  chan struct{}
	once     sync.Once
}

// Save implements monitor.Store.
func (f *flushNotifier) Save(c core.Checkpoint) error {
	last := false
	select {
	case <-f.stopping:
		last = true
	default:
	}
	err := f.Store.Save(c)
	if last {
		f.once.Do(func() { close(f.flushed) })
	}
	return err
}
