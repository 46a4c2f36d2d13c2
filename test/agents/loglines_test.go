package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// logLife is an agent whose log is read step by step: each step is one change.
type logLife struct {
	*agent
	file  string // of the log
	read  int    // bytes
	parse func(line string) (map[string]string, error)
}

// step makes a change, waits until nothing is logged any more, and fails for a line that occurs twice without another one about the
// same device or resource between, and for a device with more lines than that.
func (l *logLife) step(name string, perDevice int, change func()) {
	l.Helper()
	change()
	for size, quiet := -1, 0; quiet < 8; quiet++ {
		if text := l.text(); len(text) != size {
			size, quiet = len(text), 0
		}
		time.Sleep(100 * time.Millisecond)
	}
	text := l.text()
	seen, latest, count := map[string]bool{}, map[string]string{}, map[string]int{}
	for line := range strings.Lines(text[l.read:]) {
		fields, err := l.parse(strings.TrimSuffix(line, "\n"))
		if err != nil {
			l.Errorf("%s: %v: %s", name, err, line)
			continue
		}
		if fields["@level"] == "debug" { // of NVIDIA's library: Nomad drops them, unless its own level is debug
			continue
		}
		key, subject := lineText(fields), fields["id"]+fields["resource"]
		if count[fields["id"]]++; fields["id"] != "" && count[fields["id"]] > perDevice {
			l.Errorf("%s: more than %d lines about a device: %s", name, perDevice, key)
		}
		again := subject == "" && seen[key] && (name != unloading || !strings.Contains(key, "CDI specification written"))
		if again || subject != "" && latest[subject] == key {
			l.Errorf("%s: twice: %s", name, key)
		}
		seen[key], latest[subject] = true, key
	}
	l.read = len(text)
}

func (l *logLife) text() string {
	text, err := os.ReadFile(l.file)
	if err != nil && !os.IsNotExist(err) {
		l.Error(err)
	}
	return string(text)
}

// lineText is a line without its time.
func lineText(fields map[string]string) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		if key != "time" && key != "@timestamp" {
			parts = append(parts, key+"="+fields[key])
		}
	}
	return strings.Join(parts, " ")
}

// parseJSON returns the fields of a line, which must have a time, a level and a message by these keys.
func parseJSON(when, level, message string) func(string) (map[string]string, error) {
	return func(line string) (map[string]string, error) {
		var values map[string]any
		if err := json.Unmarshal([]byte(line), &values); err != nil {
			return nil, err
		}
		fields := map[string]string{}
		for key, value := range values {
			fields[key] = fmt.Sprint(value)
		}
		if _, err := time.Parse("2006-01-02T15:04:05.999999999Z07:00", fields[when]); err != nil {
			return nil, err
		}
		if !slices.Contains([]string{"debug", "info", "warn", "error"}, strings.ToLower(fields[level])) || fields[message] == "" {
			return nil, fmt.Errorf("level %q, message %q", fields[level], fields[message])
		}
		return fields, nil
	}
}

var (
	textLine  = regexp.MustCompile(`^time=\S+ level=(?:INFO|WARN|ERROR) msg=(?:"(?:[^"\\]|\\.)*"|\S+)(?: [\w.-]+=(?:"(?:[^"\\]|\\.)*"|[^\s"]*))*$`)
	textField = regexp.MustCompile(`([\w.-]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)`)
)

// parseText returns the fields of a line of text.
func parseText(line string) (map[string]string, error) {
	if !textLine.MatchString(line) {
		return nil, errors.New("not a line of text")
	}
	fields := map[string]string{}
	for _, m := range textField.FindAllStringSubmatch(line, -1) {
		fields[m[1]] = m[2]
	}
	return fields, nil
}

// Through start, faults and recoveries, unload, reloads, restarts of the kubelet, and another process that changes the CDI
// specification, each change is logged once, in each format.
func TestNothingIsLoggedTwice(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name, program, format string
		parse                 func(string) (map[string]string, error)
	}{
		{"nomad", nomadGPU, "", parseJSON("@timestamp", "@level", "@message")},
		{"k8s JSON", k8sGPU, "auto", parseJSON("time", "level", "msg")},
		{"k8s text", k8sGPU, "text", parseText},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			a := newAgent(t, tc.program, "h100x8", map[string]any{
				"simulation": "true", "health_period": "500ms", "health_settle": "1s", "recovery_dwell": "5s",
			})
			live(&logLife{agent: a, parse: tc.parse}, tc.format)
		})
	}
}

// unloading is the step in which the nodes go one after the other, then the driver: an agent that looks in between has devices whose nodes
// are missing, and writes its CDI specification without them, each time with the same number of names.
const unloading = "unload"

const lifePolicy = header + `policy:
  rules:
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 4}
    - {select: {index: 7}, use: reserved}
    - {select: {model: "*B200*"}, use: reserved}
`

// live is the life of an agent.
func live(l *logLife, format string) {
	l.file = filepath.Join(l.dir, "log")
	script := filepath.Join(l.dir, "agent")
	l.must(os.WriteFile(script, []byte("#!/bin/sh\nexec "+l.binary+` "$@" 2>>`+l.file+"\n"), 0o700))
	l.binary = script
	folder := filepath.Join(l.dir, "cdi")
	l.must(os.Mkdir(folder, 0o755))
	l.settings["cdi_dir"] = folder
	l.useFile(lifePolicy)
	specification := filepath.Join(folder, "nomad.device-plugin.nvidia.com-gpu.json")
	if l.program == k8sGPU {
		l.settings["log_format"], l.settings["device_list_strategy"] = format, "cdi-cri"
		specification = filepath.Join(folder, "k8s.device-plugin.nvidia.com-gpu.json")
	} else {
		l.settings["injection"] = []any{"cdi"}
	}
	await := func(text string) {
		l.Helper()
		l.await(text, func() bool { return strings.Contains(l.text()[l.read:], text) })
	}
	reload := func(text, want string) func() {
		return func() { l.useFile(text); l.signal(syscall.SIGHUP); await(want) }
	}
	l.step("start", 1, func() { l.start(); await("device found") })
	l.step("XID", 1, func() { l.xid(2, 95); await("device unhealthy") })
	l.step("reset", 1, func() { l.must(l.driver.Reset(2)); await("device healthy") })
	l.step("lost", 1, func() { l.must(l.driver.Lose(3)); await("device lost") })
	l.step("restored", 2, func() { l.must(l.driver.Restore(3)); await("device healthy") })
	l.step("fails", 1, func() { l.must(l.driver.Fail(simdriver.GPU(4), "*", "UNKNOWN", simdriver.Always)); await("device un") })
	l.step("healed", 1, func() { l.must(l.driver.Heal()); await("device healthy") })
	l.step(unloading, 3, func() { l.must(l.driver.Unload()); await("driver absent") })
	l.step("load", 1, func() { l.must(l.driver.Load()); await("driver ready"); await("device healthy") })
	l.step("invalid", 0, reload(strings.Replace(lifePolicy, "replicas: 4", "replicas: none", 1), "eplicas"))
	l.step("invalid again", 0, reload(strings.Replace(lifePolicy, "replicas: 4", "replicas: none", 1), "eplicas"))
	l.step("policy", 1, reload(strings.Replace(lifePolicy, "replicas: 4", "replicas: 2", 1), "reloaded"))
	l.step("same policy", 0, reload(strings.Replace(lifePolicy, "replicas: 4", "replicas: 2", 1), "reloaded"))
	l.step("simulate", 2, func() { l.prints("XID_79", "simulate", "xid", "79", "--gpu", "3"); await("device unhealthy") })
	l.step("clear", 1, func() { l.prints("cleared", "clear", "--gpu=3"); await("device healthy") })
	l.step("quiesce", 1, func() { l.prints("driver released", "quiesce"); await("device unknown") })
	l.step("resume", 1, func() { l.prints("devices: 7 healthy", "resume"); await("device healthy") })
	node := filepath.Join(l.driver.Root, "dev/nvidia5")
	l.step("node removed", 1, func() { l.must(os.Rename(node, node+".away")) })
	l.step("node back", 1, func() { l.must(os.Rename(node+".away", node)) })
	l.step("specification contested", 100, func() {
		for i := range 24 {
			l.must(os.WriteFile(specification, fmt.Appendf(nil, `{"cdiVersion": "0.3.0", "kind": "other.com/gpu", "devices": [], "n": %d}`, i), 0o600))
			time.Sleep(300 * time.Millisecond)
		}
	})
	if l.program == k8sGPU {
		l.step("kubelet restarts", 0, func() { l.kubelet.Stop(); time.Sleep(time.Second); l.must(l.kubelet.Start()); await("registered") })
		l.step("kubelet crashes", 0, func() { l.kubelet.Crash(); time.Sleep(2 * time.Second); l.must(l.kubelet.Start()); await("registered") })
		l.step("restarts", 1, reload(strings.Replace(lifePolicy, "policy:", "flags: {gdsEnabled: true}\npolicy:", 1), "device found"))
	}
	l.step("end", 0, func() { l.stop() })
	if n := strings.Count(l.text(), "changed by another process, and is written again"); n != 1 {
		l.Errorf("the contest is logged %d times", n)
	}
}
