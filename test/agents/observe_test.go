package agents

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/test/check"
	"github.com/tandem-gpu/tandem/test/rig"
)

// await waits until something holds.
func (a *agent) await(what string, holds func() bool) {
	a.Helper()
	check.Within(a.T, timeout, what, holds)
}

// awaitFile waits until a file exists and has text.
func (a *agent) awaitFile(path, text string) {
	a.Helper()
	a.await(text+" in "+path, func() bool {
		file, err := os.ReadFile(path)
		return err == nil && strings.Contains(string(file), text)
	})
}

// devices is what the scheduler has now; for k8s-gpu the reasons are from /inventory.
func (a *agent) devices() map[string]rig.View {
	if a.program == nomadGPU {
		return a.nomad.Devices()
	}
	devices := rig.KubeletDevices(a.kubelet)
	var inventory report.Report
	if _, page := a.get("/inventory"); json.Unmarshal([]byte(page), &inventory) == nil {
		for _, d := range inventory.Devices {
			if v, ok := devices[string(d.ID)]; ok {
				v.Reason = d.Health
				devices[v.ID] = v
			}
		}
	}
	return devices
}

// words is the reason of a device without the cause, with which Nomad's text begins.
func (a *agent) words(v rig.View) string {
	if _, words, ok := strings.Cut(v.Reason, " "); ok && a.program == nomadGPU {
		return words
	}
	return v.Reason
}

// healthy waits until the scheduler has so many devices, of which so many are healthy.
func (a *agent) healthy(all, healthy int) {
	a.Helper()
	a.await(fmt.Sprintf("%d of %d devices are healthy", healthy, all), func() bool {
		devices, n := a.devices(), 0
		for _, d := range devices {
			if d.Healthy {
				n++
			}
		}
		return len(devices) == all && n == healthy
	})
}

// firstUnhealthy are the unhealthy devices in the first list with devices after the latest start, which has n devices.
func (a *agent) firstUnhealthy(n int) (ids []string) {
	a.Helper()
	first := map[string]bool{}
	a.await("the first list", func() bool {
		for _, f := range a.nomad.Fingerprints() {
			for id, d := range f.Devices() {
				first[id] = d.Healthy
			}
			if len(first) > 0 {
				return true
			}
		}
		if a.program == nomadGPU {
			return false
		}
		lists := a.kubelet.Lists(resource)
		if len(lists) <= a.lists {
			return false
		}
		for _, d := range lists[a.lists] {
			first[d.GetID()] = d.GetHealth() == v1beta1.Healthy
		}
		return true
	})
	if len(first) != n {
		a.Errorf("the first list has %d devices, want %d", len(first), n)
	}
	for id, healthy := range first {
		if !healthy {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// allocate gives devices to a container and returns its environment.
func (a *agent) allocate(ids ...string) (env map[string]string, err error) {
	if a.program == nomadGPU {
		g, err := a.nomad.Reserve(ids...)
		return g.Env, err
	}
	g, err := rig.Allocate(a.Context(), a.kubelet, cmp.Or(rig.KubeletDevices(a.kubelet)[ids[0]].Name, resource), ids...)
	return g.Env, err
}

// allocates fails unless a GPU can be allocated.
func (a *agent) allocates(slot int) {
	a.Helper()
	if _, err := a.allocate(a.driver.UUID(slot)); err != nil {
		a.Error(err)
	}
}

// command runs a command of an operator.
func (a *agent) command(args ...string) (string, error) {
	out, err := exec.CommandContext(a.Context(), filepath.Join(bin, a.program), append(args, "--state-dir="+a.state)...).CombinedOutput()
	return string(out), err
}

// prints fails unless a command succeeds and prints want.
func (a *agent) prints(want string, args ...string) {
	a.Helper()
	if out, err := a.command(args...); err != nil || !strings.Contains(out, want) {
		a.Errorf("%v: %v, want %q:\n%s", args, err, want, out)
	}
}

// report is what inspect prints now.
func (a *agent) report() (r report.Report) {
	a.Helper()
	if out, err := a.command("inspect", "--json"); err != nil || json.Unmarshal([]byte(out), &r) != nil {
		a.Fatalf("%v:\n%s", err, out)
	}
	return r
}

// answers waits until inspect is answered by the agent that runs.
func (a *agent) answers() {
	a.Helper()
	a.await("an answer of the agent", func() bool { return a.report().Source == report.FromAgent })
}

// counts waits for the counts of XIDs in the report: "3:XID_95:1" for one XID 95 of GPU 3.
func (a *agent) counts(want string) {
	a.Helper()
	a.await("counts "+want, func() bool {
		var got []string
		for _, c := range a.report().Counts {
			got = append(got, fmt.Sprintf("%d:%s:%d", c.Index, c.Cause, c.Count))
		}
		return strings.Join(got, " ") == want
	})
}

var httpAddress = regexp.MustCompile(`http=(\S+)`)

// address is that of k8s-gpu's HTTP server; "" before it listens.
func (a *agent) address() string {
	all := httpAddress.FindAllStringSubmatch(a.log.String(), -1)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1][1]
}

// get is a page of k8s-gpu's HTTP server; "" if it does not answer.
func (a *agent) get(path string) (code int, page string) {
	r, err := http.NewRequestWithContext(a.Context(), http.MethodGet, "http://"+a.address()+path, nil)
	if err != nil {
		return 0, ""
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, ""
	}
	defer func() { _ = response.Body.Close() }()
	body, _ := io.ReadAll(response.Body) // what came
	return response.StatusCode, string(body)
}

// ready waits until /readyz of k8s-gpu has that status and text.
func (a *agent) ready(want int, text string) {
	a.Helper()
	if a.program == nomadGPU {
		return
	}
	a.await("/readyz with "+text, func() bool {
		code, page := a.get("/readyz")
		return code == want && strings.Contains(page, text)
	})
}

// alive fails unless the liveness probe of k8s-gpu succeeds.
func (a *agent) alive() {
	a.Helper()
	if a.program == k8sGPU {
		if code, text := a.get("/healthz"); code != http.StatusOK {
			a.Errorf("/healthz: %d %s", code, text)
		}
	}
}

// shows waits until a page of k8s-gpu has every text. nomad-gpu has no pages.
func (a *agent) shows(path string, texts ...string) {
	a.Helper()
	for _, text := range texts {
		if a.program == k8sGPU {
			a.await(text+" in "+path, func() bool { _, page := a.get(path); return strings.Contains(page, text) })
		}
	}
}

func (a *agent) metrics(lines ...string) {
	a.Helper()
	a.shows("/metrics", lines...)
}

// logs waits until the log has a line of that level ("" = any) with all parts.
func (a *agent) logs(level string, parts ...string) {
	a.Helper()
	a.await(level+" "+strings.Join(parts, ", "), func() bool {
		for line := range strings.Lines(a.log.String()) {
			lacks := func(part string) bool { return !strings.Contains(line, part) }
			if !slices.ContainsFunc(parts, lacks) && (level == "" || !lacks("["+level+"]") || !lacks("level="+level)) {
				return true
			}
		}
		return false
	})
}

// times is how often the log has text.
func (a *agent) times(text string) int { return strings.Count(a.log.String(), text) }

// logsTimes waits until the log has text so often.
func (a *agent) logsTimes(text string, n int) {
	a.Helper()
	a.await(fmt.Sprintf("%d times %s", n, text), func() bool { return a.times(text) >= n })
}
