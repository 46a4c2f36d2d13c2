package kube

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi/kubeapitest"
	"github.com/tandem-gpu/tandem/internal/util/problem"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/check"
)

// choiceFixture is a node with an API server and a folder of configurations, of which "broken" is invalid.
type choiceFixture struct {
	t      *testing.T
	server *kubeapitest.Server
	before config.Kubernetes
	choice *configChoice
}

func newChoiceFixture(t *testing.T) *choiceFixture {
	f := &choiceFixture{t: t, server: kubeapitest.NewInMemory()}
	t.Cleanup(f.server.Close)
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "broken"} {
		check.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	f.before.ByLabel = config.ByLabel{Dir: dir, Label: config.DefaultConfigLabel, Default: "a"}
	f.before.Health.StateDir, f.before.DRA.Node = t.TempDir(), "n1"
	f.label("")
	return f
}

func (f *choiceFixture) label(value string) {
	labels := map[string]string{}
	if value != "" {
		labels[config.DefaultConfigLabel] = value
	}
	f.server.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1", Labels: labels}})
}

// start is the start of a process.
func (f *choiceFixture) start() error {
	api, err := kubeapi.New(kubeapi.Options{Address: f.server.URL, Dial: f.server.Dial})
	check.NoError(f.t, err)
	node := &nodeWatch{api: api, node: "n1", labels: watch.NewValue[map[string]string](nil)}
	f.choice = newConfigChoice(f.before, node)
	return f.choice.readLabel(f.t.Context())
}

var errBroken = errors.New("c.yaml:1: broken")

// read is the name of the configuration that is read, or "!" and the error.
func (f *choiceFixture) read() string {
	name := ""
	_, err := f.choice.read(func(n string) (s config.Kubernetes, err error) {
		if name = n; n == "broken" {
			return s, errBroken
		}
		return s, nil
	})
	if err != nil {
		return "!" + err.Error()
	}
	return name
}

func (f *choiceFixture) problems() string {
	return strings.Join(append(problem.Lines(f.choice.problems.List()), problem.Lines(f.choice.node.problems.List())...), "\n")
}

func (f *choiceFixture) want(when, got, want string) {
	f.t.Helper()
	if got != want && (want == "" || !strings.Contains(got, want)) {
		f.t.Errorf("%s: %q, want %q", when, got, want)
	}
}

// The label chooses at the start, and while the agent runs: each new value asks for one read.
func TestConfigurationFollowsTheLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newChoiceFixture(t)
		defer f.server.Close()
		check.NoError(t, f.start())
		f.want("without the label", f.read(), "a")
		ctx, cancel := context.WithCancel(t.Context())
		changed, ended := make(chan struct{}, 1), make(chan struct{}, 2)
		go func() { _ = f.choice.node.run(ctx); ended <- struct{}{} }()
		go func() { _ = f.choice.run(ctx, changed); ended <- struct{}{} }()
		step := func(when string, change func(), want string) {
			t.Helper()
			change()
			time.Sleep(2 * time.Minute)
			select {
			case <-changed:
				f.want(when, f.read(), want)
			default:
				f.want(when, "no read", want)
			}
		}
		step("nothing", func() {}, "no read")
		step("the label", func() { f.label("b") }, "b")
		step("another label of the node", func() {
			f.server.PutNode(kubeapi.Node{Metadata: kubeapi.ObjectMeta{Name: "n1", Labels: map[string]string{config.DefaultConfigLabel: "b", "x": "y"}}})
		}, "no read")
		step("no such configuration", func() { f.label("c") }, `!node label nvidia.com/device-plugin.config = "c": there is no such configuration in `+f.before.ByLabel.Dir+", which has a, b, broken: set the label")
		step("an invalid one", func() { f.label("broken") }, "!configuration \"broken\", selected by the node label nvidia.com/device-plugin.config = \"broken\", is invalid:\nc.yaml:1: broken")
		step("an API server that is away", func() { f.server.SetDown(true) }, "no read")
		f.want("an API server that is away", f.problems(), "the labels of Node n1 can't be read, those that were read last apply")
		step("back, with another label", func() { f.server.SetDown(false); f.label("b") }, "b")
		f.want("at the end", f.problems(), "")
		step("a watch that ends", func() { f.server.EndWatches(); f.label("") }, "a")
		step("a removed record", func() { check.NoError(t, os.RemoveAll(f.before.Health.StateDir)) }, "no read")
		if name, ok := readRecord(recordPath(f.before)); !ok || name != "a" {
			t.Errorf("the record is not written again: %q", name)
		}
		step("a deleted Node", func() { f.server.DeleteNode("n1"); f.server.EndWatches() }, "no read")
		cancel()
		<-ended
		<-ended
	})
}

// A start uses what was in force last, if the label can't be read or names no valid configuration. On a node where none was, it fails.
func TestStartWithoutTheLabel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newChoiceFixture(t)
		defer f.server.Close()
		f.server.SetDown(true)
		if err := f.start(); err == nil || !strings.Contains(err.Error(), "the node label nvidia.com/device-plugin.config selects the configuration, and can't be read; none was in force on this node before: get nodes n1") {
			t.Errorf("%v", err)
		}
		f.server.SetDown(false)
		f.label("c")
		check.NoError(t, f.start())
		f.want("no such configuration, and none before", f.read(), `!node label nvidia.com/device-plugin.config = "c"`)
		f.label("b")
		check.NoError(t, f.start())
		f.want("the first", f.read(), "b")
		if name, err := ConfigInForce(f.before); name != "b" || err != nil {
			t.Errorf("in force %q, %v", name, err)
		}
		f.server.SetDown(true)
		check.NoError(t, f.start())
		f.want("no API server", f.read(), "b")
		f.server.SetDown(false)
		for _, bad := range []string{"c", "broken"} {
			f.label(bad)
			check.NoError(t, f.start())
			f.want("bad: "+bad, f.read(), "b")
			f.want("bad: "+bad, f.problems(), `configuration "b" is in force, as before the start: `)
			f.want("bad: "+bad, f.problems(), `nvidia.com/device-plugin.config = "`+bad+`"`)
		}
		f.label("a")
		check.NoError(t, f.choice.node.readFirst(t.Context(), time.Second))
		f.want("mended", f.read(), "a")
		f.want("mended", f.problems(), "")
	})
}
