package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/test/rig"
)

// reserveAll reserves each device under both orchestrators, alone, and all together.
func (r *run) reserveAll(ctx context.Context) {
	const part = "reservations"
	if !r.runs(part) {
		return
	}
	devices := r.devices()
	views := r.kubelet.View(ctx)
	var forNomad, forKubelet []error
	for _, id := range devices {
		g, err := r.nomad.Reserve(id)
		forNomad = append(forNomad, r.checkGrant(g, err, "CUDA_VISIBLE_DEVICES", id))
		g, err = r.kubelet.Grant(ctx, views[id].Name, id)
		forKubelet = append(forKubelet, r.checkGrant(g, err, "NVIDIA_VISIBLE_DEVICES", id))
	}
	detail := fmt.Sprintf("%d devices, each alone: variables, device nodes on this node", len(devices))
	r.check(part, "Nomad", detail, errors.Join(forNomad...))
	r.check(part, "kubelet", detail, errors.Join(forKubelet...))
	const unknown = "GPU-00000000-0000-0000-0000-000000000000"
	_, nomadErr := r.nomad.Reserve(unknown)
	_, kubeletErr := r.kubelet.Grant(ctx, "nvidia.com/gpu", unknown)
	if nomadErr == nil || kubeletErr == nil {
		r.add(part, "an unknown device is refused", Failed, fmt.Sprintf("Nomad: %v; kubelet: %v", nomadErr, kubeletErr))
		return
	}
	r.add(part, "an unknown device is refused", OK, "by both")
}

// checkGrant checks variables and device nodes of one device.
func (r *run) checkGrant(g rig.Grant, err error, variable, id string) error {
	if err != nil {
		return fmt.Errorf("%s: %w", id, err)
	}
	if g.Env[variable] != id {
		return fmt.Errorf("%s: %s is %q", id, variable, g.Env[variable])
	}
	own := 0
	for _, node := range g.Nodes {
		path, _, _ := strings.Cut(node, " ")
		if _, err := os.Stat(filepath.Join(r.roots.Dev, path)); err != nil {
			return fmt.Errorf("%s: device node %w", id, err)
		}
		if number := strings.TrimPrefix(path, "/dev/nvidia"); number != path && number != "" && number[0] >= '0' && number[0] <= '9' {
			own++
		}
	}
	if own != 1 {
		return fmt.Errorf("%s: device nodes %v: want one /dev/nvidiaN", id, g.Nodes)
	}
	return nil
}
