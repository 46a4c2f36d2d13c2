package hostwatch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

var errNoFolder = errors.New("state_dir is empty")

// troubled takes note of why overlaps are not seen, or of what is seen of us: once, until it changes.
func (w *Watcher) troubled(err error) {
	text := ""
	switch _, part := errors.AsType[unwritten](err); {
	case err == nil:
	case errors.Is(err, errTwin):
		text = fmt.Sprintf("another %s is running with the same state_dir: give each its own, or stop one", w.register.agent)
	case part:
		text = "other agents can't see what this one offers: " + oneLine(err)
	default:
		text = "what other agents offer can't be seen: " + oneLine(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if text == w.trouble {
		return
	}
	w.trouble = text
	switch {
	case text == "":
		w.log.Info("overlaps with other agents are seen again")
	case errors.Is(err, errNoFolder) && !w.refuse: // as somebody wanted it
		w.log.Info(text)
	case errors.Is(err, errTwin):
		w.log.Error(text)
	default:
		w.log.Warn(text)
	}
}

// missing takes note of agents that claim what we offer, and do not run.
func (w *Watcher) missing(gone []other) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Equal(gone, w.gone) {
		return
	}
	for _, a := range gone {
		if !slices.ContainsFunc(w.gone, func(b other) bool { return b.agent == a.agent }) {
			w.log.Warn(a.String())
		}
	}
	w.gone = gone
}

func (a other) String() string {
	return fmt.Sprintf("%s is not running and claims %d of the devices offered here, as its workloads may be: if it is gone for good, remove %s",
		a.agent, a.devices, a.file)
}

// Warnings say in a line each what an operator has to know of the host.
func (w *Watcher) Warnings() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var notes []string
	if w.trouble != "" {
		notes = append(notes, w.trouble)
	}
	for _, a := range w.gone {
		notes = append(notes, a.String())
	}
	return notes
}

func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
