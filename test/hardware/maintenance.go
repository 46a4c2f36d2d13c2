package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// pids are the processes of the agents.
func (r *run) pids() map[string]string {
	return map[string]string{nomadGPU: r.nomad.PID(), k8sGPU: strconv.Itoa(r.kubelet.PID())}
}

// open are the device nodes that the agents have open.
func (r *run) open() (texts []string) {
	for name, pid := range r.pids() {
		for _, node := range r.openNodes("/proc/" + pid) {
			texts = append(texts, name+" "+node)
		}
	}
	return texts
}

// maintain quiesces both agents, checks that they have released the driver, and lets them use it again. The driver is not
// touched meanwhile.
func (r *run) maintain(ctx context.Context) {
	const part = "maintenance"
	if !r.runs(part) {
		return
	}
	if nodes := r.open(); len(nodes) == 0 {
		r.add(part, "before", Failed, "no agent has a device node open: what follows shows nothing")
	} else {
		r.add(part, "before", Note, fmt.Sprintf("%d device nodes open, %s", len(nodes), firstLine(r.moduleUse().String())))
	}
	began := time.Now()
	for _, name := range agents {
		_, err := r.verb(ctx, name, r.stateDir(name), "quiesce")
		r.check(part, name+" quiesce", "", err)
	}
	took := time.Since(began).Seconds()
	var err error
	if nodes := r.open(); len(nodes) > 0 {
		err = errors.New("still open: " + strings.Join(nodes, ", "))
	}
	r.check(part, "the driver is released", fmt.Sprintf("no device node is open, after %.2f s", took), err)
	r.checkUseCount("use count after quiesce")
	r.checkRefused(ctx)
	began = time.Now()
	for _, name := range agents {
		_, err := r.verb(ctx, name, r.stateDir(name), "resume")
		r.check(part, name+" resume", "", err)
	}
	r.check(part, "work can start again", fmt.Sprintf("after %.2f s", time.Since(began).Seconds()), r.awaitReservable(ctx))
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// checkUseCount compares the use count of the kernel module with that before the agents were started. Other processes can change it.
func (r *run) checkUseCount(name string) {
	now := r.moduleUse()
	switch {
	case now.count == "" || r.idle.count == "":
		r.add("maintenance", name, LeftOut, "the kernel does not show the use count of the module nvidia here")
	case now.count == r.idle.count:
		r.add("maintenance", name, OK, now.count+", as before the agents were started")
	default:
		r.add("maintenance", name, Note, fmt.Sprintf("%s, and %s before the agents were started; processes now: %s", now.count, r.idle.count, now))
	}
}

// checkRefused checks that no device can be reserved, for the reason that is given.
func (r *run) checkRefused(ctx context.Context) {
	id := r.devices()[0]
	_, nomadErr := r.nomad.Reserve(id)
	_, kubeletErr := r.kubelet.Grant(ctx, r.kubelet.View(ctx)[id].Name, id)
	for _, err := range []error{nomadErr, kubeletErr} {
		if err == nil || !strings.Contains(err.Error(), "maintenance") {
			r.add("maintenance", "reservations are refused", Failed, fmt.Sprintf("Nomad: %v; kubelet: %v", nomadErr, kubeletErr))
			return
		}
	}
	r.add("maintenance", "reservations are refused", OK, "by both, with the reason")
}

// awaitReservable waits until every device is healthy for both orchestrators, and can be reserved.
func (r *run) awaitReservable(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	err := r.awaitHealthy(ctx)
	for _, id := range r.devices() {
		_, nomadErr := r.nomad.Reserve(id)
		_, kubeletErr := r.kubelet.Grant(ctx, r.kubelet.View(ctx)[id].Name, id)
		err = errors.Join(err, nomadErr, kubeletErr)
	}
	return err
}

// stopAgents ends both agents.
func (r *run) stopAgents(context.Context) {
	if r.nomad != nil {
		r.nomad.Stop()
	}
	if r.kubelet != nil {
		r.check("end", "k8s-gpu ends on SIGTERM", "", r.kubelet.End())
	}
	if r.nomad != nil && r.kubelet != nil {
		r.checkUseCount("use count after the end")
	}
}
