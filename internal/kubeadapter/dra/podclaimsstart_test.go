package dra

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// A kubelet that has just started may not list a pod of NVIDIA's driver. While that has a claim, devices are kept back until the list is
// complete, or for two minutes; without one a new node does not wait.
func TestFirstAnswerLacksPods(t *testing.T) {
	for name, c := range map[string]struct {
		file    string
		limit   time.Duration
		waits   bool
		release func(*pods)
	}{
		"new node":       {"k8s.device-plugin.nvidia.com-gpu.json", time.Hour, false, nil},
		"its pod is one": {"k8s.gpu.nvidia.com-claim_uid-1.yaml", time.Hour, true, func(p *pods) { p.set(nil, podClaim("old", "gpu-0")) }},
		"it has ended":   {"k8s.gpu.nvidia.com-claim_uid-1.yaml", time.Hour, true, func(p *pods) { p.partial(false) }},
		"for too long":   {"k8s.gpu.nvidia.com-claim_uid-1.yaml", 3 * time.Second, true, func(*pods) {}},
	} {
		p := &pods{}
		p.partial(true)
		r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()), asking(p), func(a *Adapter) {
			a.limits.partial = c.limit
			folder := a.opts.CDIFolder
			if err := errors.Join(os.MkdirAll(folder, 0o755), os.WriteFile(filepath.Join(folder, c.file), nil, 0o600)); err != nil {
				t.Error(err)
			}
		})
		if c.waits {
			r.awaitQueries(p, 5)
			if r.wantProblems(c.file); r.adapter.Desired().Load() != nil {
				t.Errorf("%s: devices are offered", name)
			}
			c.release(p)
		}
		r.await("devices", func() bool { return len(r.adapter.Desired().Load()) == 2 })
		if tainted := len(r.adapter.Desired().Load()[0].Taints) > 0; tainted != (name == "its pod is one") {
			t.Errorf("%s: tainted %t", name, tainted)
		}
		r.stop()
	}
}

// What the first answer has of another driver counts if the kubelet does not answer the second question: devices that were kept back are not
// offered as free.
func TestSecondQuestionNotAnswered(t *testing.T) {
	asked := 0
	r := newRig(t, build(coretest.GPUs(2), health.Ledger{}, config()))
	r.stop()
	a := r.adapter
	a.opts.PodClaims = func(context.Context) (PodClaims, error) {
		if asked++; asked == 1 {
			return PodClaims{Claims: []PodClaim{podClaim("old", "gpu-0")}}, nil
		}
		return PodClaims{}, errors.New("connection refused")
	}
	a.admission.Store(admission{pending: true})
	a.queryPods(t.Context(), pendingAtMost)
	if v := a.admission.Load(); asked != 2 || v.pending || !strings.Contains(v.text(), "pod default/pod-old has device gpu-0") {
		t.Errorf("%d questions, %+v", asked, v)
	}
	r.wantProblems("the kubelet does not list the claims of pods")
}
