package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/tandem-gpu/tandem/test/rig"
)

// noPolicy is what the agents start with. They go on with sharing, or on a machine with one or two GPUs with sharingOne.
const (
	noPolicy = "version: v1\n"
	sharing  = `version: v1
policy:
  rules:
    - {select: {index: [0, 1]}, use: time-slicing, replicas: 4}
    - {select: {index: 2}, use: reserved}
`
	sharingOne = `version: v1
policy:
  rules:
    - {select: {index: 0}, use: time-slicing, replicas: 4}
`
)

// share puts another policy in the file that both agents read, and has them read it.
func (d *demo) share() error {
	policy := sharing
	if d.devices < 3 {
		policy = sharingOne
	}
	fmt.Fprintf(d.out, "\nAn operator puts this into the policy file of both agents and sends them HUP\n")
	for line := range strings.Lines(policy) {
		fmt.Fprint(d.out, "    "+line)
	}
	if err := os.WriteFile(d.policy, []byte(policy), 0o644); err != nil {
		return err
	}
	plugin, err := strconv.Atoi(d.nomad.PID())
	if err != nil {
		return err
	}
	if err := errors.Join(syscall.Kill(plugin, syscall.SIGHUP), syscall.Kill(d.kubelet.PID(), syscall.SIGHUP)); err != nil {
		return err
	}
	if err := d.bothSee("shares, all healthy", func(seen map[string]rig.View) bool {
		return len(shares(seen)) > 0 && all(seen, healthy)
	}); err != nil {
		return err
	}
	d.showPools()
	return d.shareOnce()
}

// shares are the units that are one of several of a device, in order.
func shares(seen map[string]rig.View) (ids []string) {
	for id := range seen {
		if strings.Contains(id, "::") {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// showPools counts the units by what a job and a pod request.
func (d *demo) showPools() {
	count := map[string]int{}
	kubelets := d.kubelet.View(d.ctx)
	for id, v := range d.nomad.Devices() {
		count[v.Name+"\t"+kubelets[id].Name]++
	}
	lines := make([]string, 0, len(count))
	for names, n := range count {
		lines = append(lines, fmt.Sprintf("  %d\t%s", n, names))
	}
	slices.Sort(lines)
	fmt.Fprintln(d.out, "\nWhat each scheduler can give out now")
	t := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "  units\tNomad\tKubernetes")
	fmt.Fprintln(t, strings.Join(lines, "\n"))
	_ = t.Flush()
}

// shareOnce requests two shares of one device, which are that device once.
func (d *demo) shareOnce() error {
	two := shares(d.nomad.Devices())[:2]
	device, _, _ := strings.Cut(two[0], "::")
	fromNomad, err := d.nomad.Reserve(two...)
	if err != nil {
		return fmt.Errorf("nomad: reserve %q: %w", two, err)
	}
	fromKubelet, err := d.kubelet.Grant(d.ctx, d.kubelet.View(d.ctx)[two[0]].Name, two...)
	if err != nil {
		return fmt.Errorf("kubelet: allocate %q: %w", two, err)
	}
	for _, g := range []rig.Grant{fromNomad, fromKubelet} {
		if g.Env["NVIDIA_VISIBLE_DEVICES"] != device {
			return fmt.Errorf("two shares of %s give %v", device, g.Env)
		}
	}
	fmt.Fprintf(d.out, "  two shares of one GPU are that GPU, once: NVIDIA_VISIBLE_DEVICES=%s\n", device)
	return nil
}
