//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/control"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What the hour has: a job and a pod with one GPU begin every hourTick and end hourWorks ticks later, beside a job and a pod
// with two GPUs that stay. Every hourFault ticks one GPU of each machine fails, and recovers hourRecovery ticks later.
const (
	hourTick     = 5 * time.Second
	hourWorks    = 4
	hourFault    = 60
	hourRecovery = 12
	hourScrape   = 15 * time.Second
)

// TestHour has both agents serve work on the whole clusters for E2E_HOUR minutes, each on a machine of its own with default settings, and
// prints what memory, CPU time, goroutines and descriptors they have meanwhile. It fails if goroutines or descriptors grow.
func TestHour(t *testing.T) {
	minutes, err := strconv.Atoi(os.Getenv("E2E_HOUR"))
	if err != nil {
		t.Skip("E2E_HOUR is not set to a number of minutes")
	}
	h := startHour(t)
	began := time.Now()
	scrape := time.NewTicker(hourScrape)
	tick := time.NewTicker(hourTick)
	minute := time.NewTicker(time.Minute)
	h.sample(t, began)
	number := 0
	for time.Since(began) < time.Duration(minutes)*time.Minute+hourTick {
		select {
		case <-tick.C:
			h.turn(t, number)
			number++
		case <-scrape.C:
			h.scrape(t)
		case <-minute.C:
			h.sample(t, began)
		}
	}
	t.Logf("works: %v; scrapes of both: %d", h.outcomes, h.scrapes)
	for _, a := range h.agents {
		a.report(t, minutes)
	}
	for _, ran := range []string{"job running", "pod Running"} { // a busy machine may need longer for some than they have
		if ended := number - hourWorks; h.outcomes[ran] < ended/2 {
			t.Errorf("%s: %d of %d", ran, h.outcomes[ran], ended)
		}
	}
	h.nomad.checkContent(t)
	checkDriver(t, h.machines[0])
	checkDriver(t, h.machines[1])
}

// hour is one node of each orchestrator.
type hour struct {
	nomad    *agent
	kube     *cluster
	machines [2]*simdriver.Machine // Nomad's, Kubernetes's
	agents   []*consumer
	pages    []string // addresses of metrics

	users    [2]map[int]bool // processes that use GPUs of the machines
	outcomes map[string]int
	scrapes  int
}

func startHour(t *testing.T) *hour {
	t.Helper()
	h := &hour{outcomes: map[string]int{}, users: [2]map[int]bool{{}, {}}}
	h.machines[0], h.machines[1] = install(t, "h100x8"), installIn(t, filepath.Join(stateDir(), "kube"), "h100x8")
	config := strings.Replace(onMachine(h.machines[0], "nomad-history", `http_address = "127.0.0.1:9411"`), hasty, "", 1)
	config = regexp.MustCompile(`fingerprint_period.*`).ReplaceAllString(config, "")
	h.nomad = launchClient(t, "nomad", config, write(t, "info.hcl", []byte(`log_level = "INFO"`)))
	h.kube = startCluster(t, pluginImage())
	h.kube.deployWith(t, h.machines[1].Root, "k8s-history")
	h.nomad.awaitReady(t)
	h.nomad.awaitGPUs(t, 8, 8)
	h.kube.awaitGPUs(t, 8, 8)
	h.nomad.submit(t, "gpus.nomad.hcl", "name=long", "count=2", "then=exec sleep "+marker(-1))
	h.kube.runPod(t, "long", 2)
	h.pages = []string{"http://127.0.0.1:9411/metrics", "http://" + h.kube.plugin(t).Status.PodIP + ":9410/metrics"}
	h.agents = []*consumer{
		newConsumer(t, "nomad-gpu", control.Path(filepath.Join(stateDir(), "nomad-history"), "nomad-gpu")),
		newConsumer(t, "k8s-gpu", control.Path(filepath.Join(stateDir(), "k8s-history"), "k8s-gpu")),
	}
	return h
}

// turn begins and ends work, and a fault.
func (h *hour) turn(t *testing.T, number int) {
	t.Helper()
	if old := number - hourWorks; old >= 0 {
		h.end(t, old)
	}
	h.begin(t, number)
	h.use(t)
	slot := number / hourFault % 8
	for _, m := range h.machines {
		var err error
		lost, at := number/hourFault%2 == 0, number%hourFault // every other fault is an XID
		switch {
		case at == hourFault/2 && lost:
			err = m.Lose(slot)
		case at == hourFault/2:
			err = errors.Join(m.Set(slot, "recovery_action", "1"), m.XID(slot, 95))
		case at == hourFault/2+hourRecovery && lost:
			err = m.Restore(slot)
		case at == hourFault/2+hourRecovery:
			err = m.Reset(slot)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// begin starts a job and a pod through the APIs: the commands would take more CPU time than the agents do.
func (h *hour) begin(t *testing.T, number int) {
	t.Helper()
	text, err := os.ReadFile("testdata/gpus.nomad.hcl")
	if err != nil {
		t.Fatal(err)
	}
	variables := fmt.Sprintf("name = \"job-%d\"\ncount = 1\nthen = \"exec sleep %s\"\n", number, marker(number))
	err = submitText(string(text), variables)
	h.answered(t, err)
	pod, err := os.ReadFile(render(t, "pod.yaml", map[string]string{"NAME": fmt.Sprintf("pod-%d", number), "RESOURCE": gpuResource, "COUNT": "1"}))
	if err != nil {
		t.Fatal(err)
	}
	pod = bytes.Replace(pod, []byte("sleep 1000000"), []byte("sleep "+marker(number)), 1)
	_, err = send(http.MethodPost, kubeAPI+"/api/v1/namespaces/default/pods", "application/yaml", pod)
	h.answered(t, err)
}

// answered counts a request to an orchestrator that failed: on a loaded machine one may.
func (h *hour) answered(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		h.outcomes["request failed"]++
		t.Log(err)
	}
}

// end counts what has become of a job and a pod, and removes them.
func (h *hour) end(t *testing.T, number int) {
	t.Helper()
	job, name := fmt.Sprintf("job-%d", number), fmt.Sprintf("pod-%d", number)
	var allocs []allocation // more than one if a GPU failed that the server had chosen, and the plugin refused it
	h.answered(t, h.nomad.get("/v1/job/"+job+"/allocations", &allocs))
	status := "not placed"
	for _, alloc := range allocs {
		if status = alloc.ClientStatus; status == "running" {
			break
		}
	}
	if len(allocs) > 1 {
		status = fmt.Sprintf("%s, of %d allocations", status, len(allocs))
	}
	p, err := h.kube.pod(name)
	h.answered(t, err)
	h.outcomes["job "+status]++
	h.outcomes[strings.TrimSpace("pod "+p.Status.Phase+" "+p.Status.Reason)]++
	_, err = send(http.MethodDelete, nomadAPI+"/v1/job/"+job+"?purge=true", "", nil)
	h.answered(t, err)
	_, err = send(http.MethodDelete, kubeAPI+"/api/v1/namespaces/default/pods/"+name, "", nil)
	h.answered(t, err)
}

// use has the machines show the processes of the works, as a driver would.
func (h *hour) use(t *testing.T) {
	t.Helper()
	for number, kube := range []bool{false, true} {
		present := map[int]bool{}
		for _, w := range sleepers() {
			if (w.env["NOMAD_ALLOC_ID"] == "") != kube {
				continue
			}
			present[w.pid] = true
			if !h.users[number][w.pid] {
				for gpu := range strings.SplitSeq(w.gpu, ",") {
					if err := h.machines[number].UseProcess(slotOf(t, h.machines[number], gpu), w.pid, 1024); err != nil {
						t.Fatal(err)
					}
				}
			}
		}
		for pid := range h.users[number] {
			if !present[pid] {
				if err := h.machines[number].EndProcess(pid); err != nil {
					t.Fatal(err)
				}
			}
		}
		h.users[number] = present
	}
}

// scrape reads the metrics of both agents.
func (h *hour) scrape(t *testing.T) {
	t.Helper()
	for _, page := range h.pages {
		if text, err := fetch(page); err != nil || !strings.Contains(text, "tandem_devices") {
			t.Errorf("%s: %v\n%s", page, err, text)
		}
	}
	h.scrapes++
}

// sample records both agents.
func (h *hour) sample(t *testing.T, began time.Time) {
	t.Helper()
	for _, a := range h.agents {
		a.sample(t, began)
	}
}

// send makes one request with a body and returns the response.
func send(method, url, kind string, body []byte) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer admin")
	request.Header.Set("Content-Type", kind)
	answer, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer func() { _ = answer.Body.Close() }()
	text, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode/100 != 2 {
		err = fmt.Errorf("%s %s: %s: %s", method, url, answer.Status, text)
	}
	return string(text), err
}
