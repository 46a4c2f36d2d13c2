//go:build matrix

package upgrade

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/nomad/plugins/device"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/internal/nomadadapter/nomadtest"
	"github.com/tandem-gpu/tandem/test/logbuffer"
)

const nomadGPU, k8sGPU = "nomad-gpu", "k8s-gpu"

// offer is what an orchestrator has of a device: the name of its group or resource, and whether it is healthy.
type offer struct {
	name    string
	healthy bool
}

func (o offer) String() string {
	return o.name + map[bool]string{true: " healthy", false: " unhealthy"}[o.healthy]
}

// agent is a process of a state, under its orchestrator.
type agent struct {
	*node
	program string
	log     *logbuffer.Buffer
	kubelet *kubelettest.Kubelet    // of k8s-gpu
	view    func() map[string]offer // by device ID
	first   func() map[string]offer // the first list that it sent, of each name
	end     func(syscall.Signal)
}

// startBoth starts both agents of a state, or today's.
func (n *node) startBoth(s state, bin string) map[string]*agent {
	n.Helper()
	agents := map[string]*agent{}
	for program := range faults {
		agents[program] = n.start(s, bin, program)
	}
	return agents
}

// start starts an agent of a state, or today's, on the node's state directory.
func (n *node) start(s state, bin, program string) *agent {
	n.Helper()
	n.starts++
	a := &agent{node: n, program: program, log: &logbuffer.Buffer{}}
	if program == k8sGPU {
		a.startK8s(filepath.Join(bin, program), n.settings(s, program))
	} else {
		a.startNomad(filepath.Join(bin, program), n.settings(s, program))
	}
	n.Cleanup(func() {
		a.end(syscall.SIGKILL)
		if n.Failed() {
			n.Logf("the log of %s of %q:\n%s", program, s.Name, a.log)
		}
	})
	return a
}

func (a *agent) startK8s(binary string, settings map[string]string) {
	a.Helper()
	kubelet := kubelettest.New(a.path(fmt.Sprintf("plugins%d", a.starts)))
	a.must(kubelet.Start())
	a.Cleanup(kubelet.Stop)
	a.kubelet = kubelet
	args := []string{"--kubelet-socket=" + kubelet.Socket()}
	for key, value := range settings {
		args = append(args, "--"+strings.ReplaceAll(key, "_", "-")+"="+value)
	}
	cmd := exec.Command(binary, args...)
	cmd.Stdout, cmd.Stderr = a.log, a.log
	a.must(cmd.Start())
	a.end = func(sig syscall.Signal) {
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(sig)
			_ = cmd.Wait()
		}
	}
	names := func() map[string]bool {
		all := map[string]bool{}
		for _, r := range kubelet.Registrations() {
			all[r.Resource] = true
		}
		return all
	}
	a.view, a.first = func() map[string]offer {
		seen := map[string]offer{}
		for name := range names() {
			devices, _ := kubelet.Devices(name)
			maps.Copy(seen, offers(name, devices))
		}
		return seen
	}, func() map[string]offer {
		seen := map[string]offer{}
		for name := range names() {
			if lists := kubelet.Lists(name); len(lists) > 0 {
				maps.Copy(seen, offers(name, lists[0]))
			}
		}
		return seen
	}
}

func offers(name string, devices []*v1beta1.Device) map[string]offer {
	seen := map[string]offer{}
	for _, d := range devices {
		seen[d.GetID()] = offer{name, d.GetHealth() == v1beta1.Healthy}
	}
	return seen
}

func (a *agent) startNomad(binary string, settings map[string]string) {
	a.Helper()
	cmd := exec.Command(binary)
	client := nomadtest.NewClient(cmd, hclog.New(&hclog.LoggerOptions{Name: "nomad", Level: hclog.Debug, Output: a.log}))
	a.end = func(sig syscall.Signal) {
		if cmd.Process != nil && !client.Exited() {
			_ = cmd.Process.Signal(sig)
			a.await("the plugin ends", client.Exited)
		}
		client.Kill()
	}
	plugin, err := nomadtest.Dispense(client)
	a.must(err)
	a.must(nomadtest.SetConfig(plugin, settings))
	stream, err := plugin.Fingerprint(context.Background()) // until the plugin ends
	a.must(err)
	var mu sync.Mutex
	var prints []map[string]offer
	go func() {
		for r := range stream {
			mu.Lock()
			prints = append(prints, groups(r.Devices))
			mu.Unlock()
		}
	}()
	at := func(place func() int) func() map[string]offer {
		return func() map[string]offer {
			mu.Lock()
			defer mu.Unlock()
			if len(prints) == 0 {
				return nil
			}
			return prints[place()]
		}
	}
	a.view, a.first = at(func() int { return len(prints) - 1 }), at(func() int { return 0 })
}

func groups(all []*device.DeviceGroup) map[string]offer {
	seen := map[string]offer{}
	for _, g := range all {
		for _, d := range g.Devices {
			seen[d.ID] = offer{g.Type + "/" + g.Name, d.Healthy}
		}
	}
	return seen
}

// awaitView waits until ok holds for what the orchestrator has, and returns it.
func (a *agent) awaitView(what string, ok func(map[string]offer) bool) map[string]offer {
	a.Helper()
	var seen map[string]offer
	defer func() {
		if a.Failed() {
			a.Logf("%s: %v", a.program, seen)
		}
	}()
	a.await(a.program+": "+what, func() bool {
		seen = a.view()
		return ok(seen)
	})
	return seen
}

// reported is a device in what "inspect" of today's agent prints.
type reported struct {
	ID, State, Cause string
}

// inspect runs the command of today's agent beside the one that runs.
func (a *agent) inspect(bin string) map[string]reported {
	a.Helper()
	cmd := exec.Command(filepath.Join(bin, a.program), "inspect", "--json", "--state-dir="+a.path("state"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		a.Fatalf("%v: %v\n%s", cmd.Args, err, &stderr)
	}
	var report struct{ Devices []reported }
	a.must(json.Unmarshal(out, &report))
	all := map[string]reported{}
	for _, d := range report.Devices {
		all[d.ID] = d
	}
	return all
}
