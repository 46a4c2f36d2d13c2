//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// view is what one program says of the GPUs, from the start of the view to the end of its test.
type view struct {
	name string

	mu   sync.Mutex
	said []saying // each differs from the one before
	err  error    // of the last look
}

type saying struct {
	at   time.Time
	what string
}

// lookEvery is how exact the times of a view are.
const lookEvery = 50 * time.Millisecond

// follow asks again and again. Looks that fail say nothing.
func follow(t *testing.T, name string, ask func() (string, error)) *view {
	t.Helper()
	v := &view{name: name}
	var looking sync.WaitGroup
	ctx := t.Context()
	looking.Go(func() {
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for ctx.Err() == nil {
			v.note(ask())
			<-tick.C
		}
	})
	t.Cleanup(looking.Wait)
	return v
}

func (v *view) note(what string, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.err = err
	if err == nil && (len(v.said) == 0 || v.said[len(v.said)-1].what != what) {
		v.said = append(v.said, saying{time.Now(), what})
	}
}

// await waits until what is said matches the pattern, and gives how long after since that began to be said.
func (v *view) await(t *testing.T, since time.Time, pattern string) time.Duration {
	t.Helper()
	wanted := regexp.MustCompile(pattern)
	var last saying
	await(t, v.name+" to say "+pattern, 90*time.Second, func() error {
		v.mu.Lock()
		defer v.mu.Unlock()
		if len(v.said) == 0 {
			return errors.Join(errors.New("it says nothing"), v.err)
		}
		if last = v.said[len(v.said)-1]; !wanted.MatchString(last.what) {
			return errors.Join(fmt.Errorf("it says %q", last.what), v.err)
		}
		return nil
	})
	took := max(0, last.at.Sub(since))
	t.Logf("%s after %v: %s", v.name, took.Round(time.Millisecond), last.what)
	return took
}

// since gives what was said at the time and after.
func (v *view) since(at time.Time) []string {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []string
	for i, s := range v.said {
		if s.at.Before(at) && i+1 < len(v.said) && !v.said[i+1].at.After(at) {
			continue // was over by then
		}
		all = append(all, s.what)
	}
	return all
}

// followNomad looks at the Nomad node: "7 of 8, unhealthy: ..." is one of eight devices unhealthy for that reason.
func followNomad(t *testing.T, a *agent) *view {
	t.Helper()
	return follow(t, "the Nomad node", func() (string, error) {
		n, err := a.node()
		text := fmt.Sprintf("%d of %d", n.healthy(), len(n.gpus()))
		reasons := map[string]bool{}
		for _, g := range n.gpus() {
			if !g.Healthy && !reasons[g.HealthDescription] {
				reasons[g.HealthDescription] = true
				text += ", " + g.HealthDescription
			}
		}
		return text, err
	})
}

// followNode looks at the Kubernetes node: "7 of 8" is eight GPUs of which seven are allocatable, "of" no such resource.
func followNode(t *testing.T, c *cluster) *view {
	t.Helper()
	return follow(t, "the Kubernetes node", func() (string, error) {
		capacity, allocatable, err := c.offer()
		return strings.TrimSpace(allocatable + " of " + capacity), err
	})
}

// followKubelet looks at what kubelet has been told: "7 healthy".
func followKubelet(t *testing.T, c *cluster) *view {
	t.Helper()
	return follow(t, "kubelet", func() (string, error) {
		ids, err := c.healthy()
		return fmt.Sprintf("%d healthy", len(ids)), err
	})
}
