package kube

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/node/ownership"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// leftovers are what a node with device plugins still has of the API dra, and what the agent lacks to serve that: with the component or the
// value dra its token and its folder are gone, too.
type leftovers struct {
	left    []string // "prepared claims", "GPUs"
	targets bool     // no more than targets of GPUs that did not come to the API so far
	lacks   []string
}

const backFromDRA = `put the component dra (chart: api: dra) back, run "k8s-gpu migrate apply --to device-plugin --all --wait 10m" in the agent's pod, and remove it then: docs/dra.md`

const forTargets = `add the component dra (chart: api: dra), or set another target, such as with "k8s-gpu migrate back" in the agent's pod: docs/dra.md`

func leftoversOf(s config.Kubernetes) (l leftovers) {
	dir := s.Health.StateDir
	if s.Core.API == inventory.DRA || dir == "" {
		return leftovers{}
	}
	if dra.HasClaims(dir) {
		l.left = append(l.left, "prepared claims")
	}
	if f, err := ownership.Read(dir); err == nil && f.Has(inventory.DRA) {
		l.left = append(l.left, "GPUs")
	} else if err == nil && len(l.left) == 0 {
		l.targets = ownership.Needs(dir, inventory.DRA)
	}
	if len(l.left) == 0 && !l.targets {
		return leftovers{}
	}
	if s.DRA.Node == "" {
		l.lacks = append(l.lacks, "the node's name (NODE_NAME)")
	}
	if api, err := kubeapi.New(kubeAPIOptions(s)); err != nil {
		l.lacks = append(l.lacks, "the API server's address ("+err.Error()+")")
	} else if err := api.Credentials(); err != nil {
		l.lacks = append(l.lacks, "a token of the API server ("+err.Error()+")")
	}
	folder := filepath.Join(s.DRA.KubeletDir, "plugins_registry")
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		l.lacks = append(l.lacks, "the kubelet's folder "+folder)
	}
	return l
}

// problem is why the leftovers are not served; "" = they are, or there are none.
func (l leftovers) problem() string {
	if len(l.lacks) == 0 {
		return ""
	}
	if l.targets {
		return "GPUs have the target dra, and the agent lacks what it needs to serve that: " + strings.Join(l.lacks, ", ")
	}
	return strings.Join(l.left, " and ") + " of the API dra are left on this node, and the agent lacks what it needs for them: " + strings.Join(l.lacks, ", ") +
		". Pods with claims can't end, and their GPUs stay"
}

func (l leftovers) remedy() string {
	if l.targets {
		return forTargets
	}
	return backFromDRA
}

// problems has the problem, if there is one.
func (l leftovers) problems() []problem.Problem {
	if p := l.problem(); p != "" {
		return []problem.Problem{{Code: problem.Leftovers, Text: p, Remedy: l.remedy()}}
	}
	return nil
}
