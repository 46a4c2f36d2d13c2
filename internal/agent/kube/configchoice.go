package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/problemset"
	"github.com/tandem-gpu/tandem/internal/util/reconcile"
	"github.com/tandem-gpu/tandem/internal/util/statefile"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// How long a start waits for the API server: for the label on a node where a configuration was in force before, and on another.
const (
	labelAtMost      = 5 * time.Second
	firstLabelAtMost = 20 * time.Second
)

// maxRecord limits the file with the name of the configuration, in bytes.
const maxRecord = 4 << 10

// configChoice chooses the configuration file of this node by a label of its Node. What was in force last is on disk, for a start without the API
// server or with a label that names no valid configuration.
type configChoice struct {
	by       config.ByLabel
	node     *nodeWatch
	record   string // path; "" = nothing is kept
	problems problemset.Set

	mu    sync.Mutex
	tried string // value of the label at the latest read
	known bool   // it was known then
	runs  bool   // a configuration is in force

	disk sync.Mutex // held while the record is written
	kept *string    // what it has; nil = nothing was in force yet
}

// configRecord is the file that has the configuration in force.
type configRecord struct {
	Name string // of the file in the folder of configurations; "" = none
}

// newConfigChoice returns the choice that the settings before the file ask for.
func newConfigChoice(s config.Kubernetes, node *nodeWatch) *configChoice {
	return &configChoice{by: s.ByLabel, node: node, record: recordPath(s)}
}

func recordPath(s config.Kubernetes) string {
	if s.Health.StateDir == "" {
		return ""
	}
	return filepath.Join(s.Health.StateDir, Name+".config.json")
}

// ConfigInForce is the name of the file that commands beside a running agent read: the one that was in force last on this node, else the one for a
// node without the label.
func ConfigInForce(s config.Kubernetes) (string, error) {
	if s.ByLabel.Dir == "" {
		return "", nil
	}
	if name, ok := readRecord(recordPath(s)); ok {
		return name, nil
	}
	return s.ByLabel.Choose("")
}

func readRecord(path string) (name string, ok bool) {
	if path == "" {
		return "", false
	}
	text, err := statefile.Read(path, maxRecord, 0)
	var r configRecord
	if err != nil || json.Unmarshal(text, &r) != nil {
		return "", false
	}
	return r.Name, true
}

// readLabel waits for the label at the start. Without one a node on which no configuration was in force before has none to start with.
func (c *configChoice) readLabel(ctx context.Context) error {
	_, before := readRecord(c.record)
	atMost := firstLabelAtMost
	if before {
		atMost = labelAtMost
	}
	if err := c.node.readFirst(ctx, atMost); err != nil && !before {
		return fmt.Errorf("the node label %s selects the configuration, and can't be read; none was in force on this node before: %w", c.by.Label, err)
	}
	return nil
}

// read reads the file that the label selects. At the start the one that was in force last replaces one that can't be read or is invalid.
func (c *configChoice) read(file func(name string) (config.Kubernetes, error)) (config.Kubernetes, error) {
	labels := c.node.labels.Load()
	last, before := readRecord(c.record)
	value := labels[c.by.Label]
	c.setTried(value, labels != nil)
	if labels == nil { // before is true: see readLabel
		return c.inForce(file(last))
	}
	name, err := c.by.Choose(value)
	var s config.Kubernetes
	if err == nil {
		if s, err = file(name); err != nil {
			err = &selectedError{Label: c.by.Label, Value: value, Name: name, Err: err}
		}
	}
	if err == nil {
		c.keep(name)
		c.problems.End(problem.ConfigLabel, "", "the configuration that the node's label selects is in force", "config", name)
		return c.inForce(s, nil)
	}
	if c.running() { // what runs stays, and the reloader reports why
		c.problems.End(problem.ConfigLabel, "", "")
		return s, err
	}
	if !before || last == name {
		return s, err
	}
	earlier, lastErr := file(last)
	if lastErr != nil {
		return s, err
	}
	text := fmt.Sprintf("configuration %q is in force, as before the start: %v", last, err)
	c.problems.Put(problem.Problem{Code: problem.ConfigLabel, Text: text}, slog.LevelError, text)
	return c.inForce(earlier, nil)
}

// keep writes the name of the configuration in force to disk.
func (c *configChoice) keep(name string) {
	c.disk.Lock()
	defer c.disk.Unlock()
	c.kept = &name
	c.write(name)
}

// keepAgain writes the record again if someone has removed it.
func (c *configChoice) keepAgain() {
	c.disk.Lock()
	defer c.disk.Unlock()
	if c.kept != nil && c.record != "" && statefile.IsMissing(c.record) {
		c.write(*c.kept)
	}
}

// write writes a name to the record, if it has another one. The caller holds disk.
func (c *configChoice) write(name string) {
	if was, ok := readRecord(c.record); c.record == "" || ok && was == name {
		return
	}
	text, err := json.Marshal(configRecord{Name: name})
	if err == nil {
		err = statefile.Write(c.record, text)
	}
	if err == nil {
		c.problems.End(problem.ConfigLabel, c.record, "the name of the configuration is recorded again", "file", c.record)
		return
	}
	p := problem.Problem{Code: problem.ConfigLabel, Object: c.record,
		Text: fmt.Sprintf("the name of the configuration in force can't be recorded: %v; a start without the API server has another one", err)}
	c.problems.Put(p, slog.LevelWarn, p.Text)
}

// run asks for another read whenever the label has another value than at the latest one, until ctx ends.
func (c *configChoice) run(ctx context.Context, changed chan<- struct{}) error {
	loop := reconcile.Loop{On: []reconcile.Source{c.node.labels.Changed}}
	asked, value := false, "" // a read for this value of the label was asked for
	loop.Run(ctx, func(context.Context, reconcile.Cause) time.Duration {
		if labels := c.node.labels.Load(); labels != nil {
			now := labels[c.by.Label]
			isNew := c.isNew(now)
			if isNew && (!asked || value != now) {
				watch.Notify(changed)
			}
			asked, value = isNew, now
		}
		c.keepAgain()
		return statefile.LookEvery
	})
	return nil
}

func (c *configChoice) isNew(value string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.known || c.tried != value
}

func (c *configChoice) setTried(value string, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tried, c.known = value, known
}

func (c *configChoice) running() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs
}

// inForce notes that a configuration is in force if it is valid, and returns it.
func (c *configChoice) inForce(s config.Kubernetes, err error) (config.Kubernetes, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runs = c.runs || err == nil
	return s, err
}

// selectedError is why a configuration that a label selects is not in force.
type selectedError struct {
	Label, Value string // Value "" = the node does not have the label
	Name         string // of the configuration; "" = none
	Err          error
}

// Error has label and value in a line before the problems.
func (e *selectedError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("configuration %q, that of nodes without the label %s, is invalid:\n%v", e.Name, e.Label, e.Err)
	}
	return fmt.Sprintf("configuration %q, selected by the node label %s = %q, is invalid:\n%v", e.Name, e.Label, e.Value, e.Err)
}

// Unwrap returns the problems.
func (e *selectedError) Unwrap() error { return e.Err }
