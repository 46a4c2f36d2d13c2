package control

import (
	"fmt"
	"io"
	"log/slog"
)

// persistence is whether the effect of a command outlasts a restart of the agent.
type persistence struct {
	PersistenceError string `json:"persistenceError,omitempty"` // why it does not; "" = it does
}

func newPersistence(saveErr error) (p persistence) {
	if saveErr != nil {
		p.PersistenceError = saveErr.Error()
	}
	return p
}

// attrs are its attributes in a log message.
func (p persistence) attrs() []any {
	if p.PersistenceError == "" {
		return []any{"persisted", true}
	}
	return []any{"persisted", false, "error", p.PersistenceError}
}

func (p persistence) logReverted(log *slog.Logger, command string) {
	if p.PersistenceError != "" {
		log.Warn("command not persisted, a restart of the agent reverts it", "command", command, "error", p.PersistenceError)
	}
}

func (p persistence) writeReverted(out io.Writer) error {
	if p.PersistenceError == "" {
		return nil
	}
	_, err := fmt.Fprintf(out, "done, but a restart of the agent reverts it: %s\n", p.PersistenceError)
	return err
}
