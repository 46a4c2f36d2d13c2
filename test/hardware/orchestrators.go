package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/operator/report"
	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/hardware/compare"
	"github.com/tandem-gpu/tandem/test/rig"
)

func parseReport(text string) (r report.Report, err error) {
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return r, fmt.Errorf("inspect --json: %w", err)
	}
	if !hasDriver(r.Driver.State) {
		return r, fmt.Errorf("the driver is %s: %s", r.Driver.State, r.Driver.Reason)
	}
	return r, nil
}

func (r *run) stateDir(agent string) string { return filepath.Join(r.dir, agent) }

// startAgents starts both agents, each with its own state, and waits until both orchestrators have every device.
func (r *run) startAgents(ctx context.Context) {
	const part = "agents"
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	setup := rig.Setup{Roots: r.roots, Hasty: true, Statistics: time.Second, Injection: "devices"}
	forNomad, forKubelet := setup, setup
	forNomad.StateDir, forKubelet.StateDir = r.stateDir(nomadGPU), r.stateDir(k8sGPU)
	wanted := r.devices()
	if len(wanted) == 0 {
		r.add(part, "start", Failed, "the agents list no common device")
		return
	}
	began := time.Now()
	var err error
	// The plugin ends with this context's stream, so that it is the one of the run.
	if r.nomad, err = rig.StartNomad(context.WithoutCancel(ctx), filepath.Join(r.bin, nomadGPU), forNomad, r.log); err == nil {
		err = r.nomad.Await(ctx, "all devices", func(seen map[string]rig.View) bool { return hasAll(seen, wanted) })
	}
	r.check(part, "nomad-gpu under a Nomad plugin client", fmt.Sprintf("%d devices after %.1f s", len(wanted), time.Since(began).Seconds()), err)
	began = time.Now()
	if r.kubelet, err = rig.StartKubelet(r.dir, filepath.Join(r.bin, k8sGPU), forKubelet, r.log); err == nil {
		err = r.kubelet.AwaitView(ctx, "all devices", func(seen map[string]rig.View) bool { return hasAll(seen, wanted) })
	}
	r.check(part, "k8s-gpu under a small kubelet", fmt.Sprintf("%d devices after %.1f s", len(wanted), time.Since(began).Seconds()), err)
	if r.nomad == nil || r.kubelet == nil {
		return
	}
	r.check(part, "health of every device", "healthy for both", r.awaitHealthy(ctx))
}

// awaitHealthy waits until every device is healthy for both orchestrators. The error has those that are not.
func (r *run) awaitHealthy(ctx context.Context) error {
	for {
		bad := r.unhealthy()
		if len(bad) == 0 {
			return nil
		}
		if !watch.Sleep(ctx, 200*time.Millisecond) {
			return errors.New(strings.Join(bad, "\n"))
		}
	}
}

// unhealthy are the devices that an orchestrator has as unhealthy.
func (r *run) unhealthy() (texts []string) {
	for name, seen := range map[string]map[string]rig.View{nomadGPU: r.nomad.Devices(), k8sGPU: r.kubelet.View(context.Background())} {
		for _, id := range r.devices() {
			if v := seen[id]; !v.Healthy {
				texts = append(texts, fmt.Sprintf("%s: %s: %s", name, id, v.Reason))
			}
		}
	}
	slices.Sort(texts)
	return texts
}

func hasAll(seen map[string]rig.View, ids []string) bool {
	for _, id := range ids {
		if _, ok := seen[id]; !ok {
			return false
		}
	}
	return true
}

// runs reports whether both agents run; if not, it adds that a part is left out.
func (r *run) runs(part string) bool {
	if r.nomad != nil && r.kubelet != nil {
		return true
	}
	r.add(part, "all", LeftOut, "an agent does not run")
	return false
}

// inspectRunning is the report of a running agent with the usage of its devices, which is read after the first health check.
func (r *run) inspectRunning(ctx context.Context, name string) (report.Report, error) {
	for tries := 0; ; tries++ {
		text, err := r.verb(ctx, name, r.stateDir(name), "inspect", "--json")
		if err != nil {
			return report.Report{}, err
		}
		all, err := parseReport(text)
		if err != nil {
			return all, err
		}
		if all.Source != report.FromAgent {
			return all, errors.New("inspect has not reached the agent")
		}
		if !slices.ContainsFunc(all.Devices, func(d report.Device) bool { return d.Usage == nil }) || tries == 40 {
			return all, nil
		}
		time.Sleep(500 * time.Millisecond)
	}
}

// compareValues compares everything that the agents show with nvidia-smi. Without running agents that is less.
func (r *run) compareValues(ctx context.Context) {
	const part = "values"
	all := slices.Clone(r.sources)
	if running := r.runs(part); running {
		for _, name := range agents {
			text, err := r.inspectRunning(ctx, name)
			if r.check(part, name+" inspect", fmt.Sprintf("%d devices", len(text.Devices)), err) {
				all = append(all, compare.OfReport(name+" inspect", text))
			}
		}
		all = append(all, r.readRunning(ctx)...)
	}
	files, errs := r.querySMI(ctx)
	maps.Copy(r.files, files)
	for _, err := range errs {
		r.add(part, "nvidia-smi", Note, err.Error())
	}
	smi, err := smiOf(files).Source()
	if err != nil {
		r.add(part, "nvidia-smi", Failed, err.Error())
		return
	}
	r.addValues(compare.Compare(all, smi))
}

// readRunning reads what the orchestrators and a monitoring system get.
func (r *run) readRunning(ctx context.Context) []compare.Source {
	limit, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	statistics := r.nomad.NextStatistics(limit)
	if len(statistics) == 0 {
		r.add("values", "statistics for Nomad", Failed, "none in 15 s")
	}
	page := r.kubelet.Page(ctx, "/metrics")
	r.files["metrics.txt"] = page
	r.checkSources(page)
	return []compare.Source{compare.OfNomad(r.nomad.Groups(), statistics), compare.OfMetrics(page)}
}

// checkSources checks that the agent receives the driver's events for every GPU.
func (r *run) checkSources(page string) {
	found := false
	for _, s := range compare.Samples(page) {
		if s.Name != "tandem_health_source_up" {
			continue
		}
		found = true
		result := OK
		switch {
		case s.Value == 1:
		case s.Labels["source"] == "events":
			result = Failed
		default:
			result = Note // an older driver has no recovery action
		}
		r.add("health", "source "+s.Labels["source"], result, map[bool]string{true: "in use for every GPU", false: "can't be used for every GPU"}[s.Value == 1])
	}
	if !found {
		r.add("health", "sources", Failed, "the metrics page has none")
	}
}

// diagnose runs doctor of both agents.
func (r *run) diagnose(ctx context.Context) {
	for _, name := range agents {
		args := []string{"doctor", "--json"}
		if name == k8sGPU && r.kubelet != nil {
			args = append(args, "--kubelet-socket", r.kubelet.Socket(), "--pod-resources-socket=")
		}
		text, err := r.verb(ctx, name, r.stateDir(name), args...)
		r.files[name+"-doctor.json"] = text
		var found struct {
			Problems, Warnings int
			Findings           []doctor.Finding
		}
		if parse := json.Unmarshal([]byte(text), &found); parse != nil {
			r.add("doctor", name, Failed, errors.Join(err, parse).Error())
			continue
		}
		for _, f := range found.Findings {
			line := fmt.Sprintf("%s: %s (%s)", f.Check, f.Found, f.Place)
			if f.Severity == doctor.Problem || f.Severity == doctor.Warning {
				r.add("doctor", fmt.Sprintf("%s finds a %s", name, f.Severity), Note, line)
			}
		}
		r.add("doctor", name+" ran", OK, fmt.Sprintf("%d problems, %d warnings", found.Problems, found.Warnings))
	}
}
