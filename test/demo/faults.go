package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/util/watch"
	"github.com/tandem-gpu/tandem/test/rig"
)

// loseOne takes a GPU away, sees both turn, and brings it back.
func (d *demo) loseOne() error {
	slot, concerned, err := d.faultyGPU()
	if err != nil {
		return err
	}
	if err := d.machine.Simulated.Lose(slot); err != nil {
		return err
	}
	took, err := d.onlyUnhealthy("exactly the lost GPU unhealthy", concerned)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nGPU %d (%s) falls off the bus; both know after %.1f s\n", slot, d.machine.Simulated.UUID(slot), took.Seconds())
	d.show("What each scheduler sees")
	if err := d.agreed(concerned); err != nil {
		return err
	}
	if err := d.machine.Simulated.Restore(slot); err != nil {
		return err
	}
	if took, err = d.onlyUnhealthy("all healthy again", nil); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nGPU %d is back; both offer it again after %.1f s of clean checks, nothing was restarted\n", slot, took.Seconds())
	return nil
}

// breakOne has a GPU report an uncontained memory error. It answers all the time, but only a reset makes it healthy.
func (d *demo) breakOne() error {
	slot, concerned, err := d.faultyGPU()
	if err != nil {
		return err
	}
	m := d.machine.Simulated
	if v, err := m.Get(slot, "recovery_action"); err != nil || v == "" || v == "none" {
		return err // this machine's driver reports no recovery action
	}
	time.Sleep(1100 * time.Millisecond) // each agent leaves its orchestrator a second between two updates
	if err := m.Set(slot, "recovery_action", "1"); err != nil {
		return err
	}
	if err := m.XID(slot, 95); err != nil {
		return err
	}
	took, err := d.onlyUnhealthy("exactly the broken GPU unhealthy", concerned)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nGPU %d reports XID 95 and the recovery action reset; both know after %.3f s\n", slot, took.Seconds())
	if err := d.agreed(concerned); err != nil {
		return err
	}
	for _, agent := range []string{nomadGPU, k8sGPU} {
		out, err := d.inspect(agent, "XID_95", "RECOVERY_ACTION_GPU_RESET")
		if err != nil {
			return err
		}
		fmt.Fprintf(d.out, "\n$ %s inspect\n%s", agent, out)
	}
	if err := m.Reset(slot); err != nil {
		return err
	}
	if took, err = d.onlyUnhealthy("all healthy after the reset", nil); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\nGPU %d is reset; both offer it again after %.1f s\n", slot, took.Seconds())
	return nil
}

// inspect returns what an agent's inspect prints when it has these conditions.
func (d *demo) inspect(agent string, want ...string) (string, error) {
	ctx, cancel := context.WithTimeout(d.ctx, patience)
	defer cancel()
	for {
		out, err := exec.CommandContext(ctx, filepath.Join(d.bin, agent), "inspect", "--state-dir", filepath.Join(d.state, agent)).Output()
		if err != nil {
			return "", fmt.Errorf("%s inspect: %w", agent, err)
		}
		if !slices.ContainsFunc(want, func(cause string) bool { return !strings.Contains(string(out), cause) }) {
			return string(out), nil
		}
		if !watch.Sleep(ctx, 100*time.Millisecond) {
			return "", fmt.Errorf("%s inspect has not all of %s:\n%s", agent, strings.Join(want, ", "), out)
		}
	}
}

// faultyGPU is a GPU in the middle, with its devices.
func (d *demo) faultyGPU() (slot int, concerned []string, err error) {
	slots, err := d.machine.Simulated.Slots()
	if err != nil {
		return 0, nil, err
	}
	slot = slots[len(slots)/2]
	if concerned, err = d.machine.Simulated.Instances(slot); err == nil && len(concerned) == 0 {
		concerned = []string{d.machine.Simulated.UUID(slot)}
	}
	return slot, concerned, err
}

// onlyUnhealthy waits until both see just these devices unhealthy, and returns how long that took.
func (d *demo) onlyUnhealthy(what string, concerned []string) (time.Duration, error) {
	start := time.Now()
	err := d.bothSee(what, func(seen map[string]rig.View) bool {
		return all(seen, func(v rig.View) bool { return v.Healthy != slices.Contains(concerned, v.ID) })
	})
	return time.Since(start), err
}

// itsOwn is what each agent sees for itself, on which side of a full minute it noticed, and in which call; and what only one of the two texts has:
// Nomad's begins with the cause, and has no recovery action.
var itsOwn = regexp.MustCompile(`^[A-Z][A-Z0-9_]+ | since \S+Z| \([^)]*\)|; recovery action: [^;]*`)

// agreed waits until both give the same reason, and checks that an unhealthy device can not be reserved.
func (d *demo) agreed(concerned []string) error {
	same := func(id string) bool {
		n, k := d.nomad.Devices()[id].Reason, d.kubelet.View(d.ctx)[id].Reason
		return n != "" && itsOwn.ReplaceAllString(n, "") == itsOwn.ReplaceAllString(k, "")
	}
	for _, id := range concerned {
		for deadline := time.Now().Add(patience); !same(id); time.Sleep(50 * time.Millisecond) {
			if time.Now().After(deadline) {
				return fmt.Errorf("the reasons differ: Nomad %q, Kubernetes %q", d.nomad.Devices()[id].Reason, d.kubelet.View(d.ctx)[id].Reason)
			}
		}
		if _, err := d.nomad.Reserve(id); err == nil {
			return fmt.Errorf("nomad: an unhealthy GPU can be reserved")
		}
	}
	return nil
}
