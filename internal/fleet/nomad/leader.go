package nomad

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/nomad/api"

	"github.com/tandem-gpu/tandem/internal/fleet"
	"github.com/tandem-gpu/tandem/internal/util/watch"
)

// Times of the lock. Another process gets it 2 x lockTTL + lockDelay after the latest renewal that the servers have seen; a leader stops lockTTL after it
// has sent it. 10 s is the least TTL that the servers accept.
const (
	lockTTL    = 10 * time.Second
	lockDelay  = 5 * time.Second
	renewPause = 3 * time.Second
	retryPause = time.Second // after a renewal that had no answer
	lockPause  = 5 * time.Second
)

const holderItem = "holder"

// leader elects by the lock of a variable.
type leader struct {
	*Cluster
	namespace, path, identity string

	mu     sync.Mutex
	holder string
}

// Leader returns the election by the lock of the variable PATH/leader. Its token needs read and write on that path.
func (c *Cluster) Leader(namespace, path, identity string) fleet.Leader {
	return &leader{Cluster: c, namespace: namespace, path: path + "/leader", identity: identity}
}

// Holder returns who leads, as the latest look at the variable has it.
func (l *leader) Holder() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.holder
}

func (l *leader) setHolder(who string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.holder = who
}

// Lead waits for the lock, and calls f with a context that ends lockTTL after the latest renewal.
func (l *leader) Lead(ctx context.Context, f func(context.Context)) error {
	lease, err := l.await(ctx)
	if err != nil {
		return err
	}
	l.setHolder(l.identity)
	var renewing sync.WaitGroup
	renewing.Go(func() { l.renew(lease) })
	f(lease)
	lease.end()
	renewing.Wait()
	l.setHolder("")
	l.release(lease.id)
	return nil
}

// await tries to get the lock until it has it.
func (l *leader) await(ctx context.Context) (*lease, error) {
	for {
		sent := time.Now()
		id, err := l.acquire(ctx)
		if err == nil {
			return newLease(ctx, id, sent), nil
		}
		status, _ := statusOf(err)
		if isDenied(err) || status == http.StatusBadRequest {
			return nil, fmt.Errorf("lock variable %s in namespace %s of Nomad region %s: %w", l.path, namespaceName(l.namespace), l.o.Name,
				denied(err, "the token is not valid, or its policies do not permit it"))
		}
		if status == http.StatusConflict {
			l.look(ctx)
		} else {
			l.log.Debug("no answer to the election", "error", err)
		}
		if !watch.Sleep(ctx, lockPause) {
			return nil, ctx.Err()
		}
	}
}

// lock calls one of the operations on the lock.
func (l *leader) lock(ctx context.Context, items api.VariableItems, lock api.VariableLock, call func(*api.Variable, *api.WriteOptions) (string, error)) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, fleet.CallTimeout)
	defer cancel()
	q, err := l.write(ctx, l.namespace)
	if err != nil {
		return "", err
	}
	return call(&api.Variable{Path: l.path, Items: items, Lock: &lock}, q)
}

func (l *leader) acquire(ctx context.Context) (id string, err error) {
	lock := api.VariableLock{TTL: lockTTL.String(), LockDelay: lockDelay.String()}
	return l.lock(ctx, api.VariableItems{holderItem: l.identity}, lock, func(v *api.Variable, q *api.WriteOptions) (string, error) {
		got, _, err := l.client.Variables().AcquireLock(v, q)
		if err != nil {
			return "", err
		}
		if got.Lock == nil || got.Lock.ID == "" {
			return "", errors.New("the servers returned no lock")
		}
		return got.Lock.ID, nil
	})
}

// look reads who has the lock.
func (l *leader) look(ctx context.Context) {
	q, err := l.in(ctx, l.namespace)
	if err != nil {
		return
	}
	if v, _, err := l.client.Variables().Read(l.path, q); err == nil {
		l.setHolder(v.Items[holderItem])
	}
}

// renew renews the lock until the lease ends, or the servers answer that this process does not have it.
func (l *leader) renew(lease *lease) {
	defer lease.end()
	for watch.Sleep(lease, renewPause) {
		for logged := ""; ; {
			sent := time.Now()
			_, err := l.lock(lease, nil, api.VariableLock{ID: lease.id}, func(v *api.Variable, q *api.WriteOptions) (string, error) {
				_, _, err := l.client.Variables().RenewLock(v, q)
				return "", err
			})
			if err == nil {
				lease.renewed(sent)
				break
			}
			if status, _ := statusOf(err); status == http.StatusConflict || status == http.StatusNotFound {
				l.log.Warn("the lead is lost: another process has the lock, or may get it", "error", err)
				return
			}
			if logged != err.Error() {
				logged = err.Error()
				l.log.Warn("the lead is not renewed, and is tried until it ends", "error", err)
			}
			if !watch.Sleep(lease, retryPause) {
				return
			}
		}
	}
}

// release gives the lock back, so that another process need not wait for its end. An error has no other effect.
func (l *leader) release(id string) {
	_, err := l.lock(context.Background(), nil, api.VariableLock{ID: id}, func(v *api.Variable, q *api.WriteOptions) (string, error) {
		_, _, err := l.client.Variables().ReleaseLock(v, q)
		return "", err
	})
	if err != nil {
		l.log.Debug("the lock was not given back", "error", err)
	}
}

// lease is a context that ends lockTTL after the latest renewal was sent. Err looks at the clock: after a process was stopped for some time, a goroutine may
// run before the timer.
type lease struct {
	id  string
	end context.CancelFunc

	// Of the context that end ends.
	done  <-chan struct{}
	err   func() error
	value func(any) any

	mu    sync.Mutex
	sent  time.Time // the latest renewal that was answered
	timer *time.Timer
}

func newLease(ctx context.Context, id string, sent time.Time) *lease {
	ctx, end := context.WithCancel(ctx)
	l := &lease{id: id, end: end, done: ctx.Done(), err: ctx.Err, value: ctx.Value, sent: sent}
	l.timer = time.AfterFunc(time.Until(sent.Add(lockTTL)), end)
	return l
}

// Deadline returns none: a renewal moves it.
func (l *lease) Deadline() (time.Time, bool) { return time.Time{}, false }

// Done returns a channel that is closed at the end.
func (l *lease) Done() <-chan struct{} { return l.done }

// Value returns a value of the context that the lease is for.
func (l *lease) Value(key any) any { return l.value(key) }

func (l *lease) renewed(sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lateAt(time.Now()) {
		l.end() // the answer came too late
		return
	}
	l.sent = sent
	l.timer.Reset(time.Until(sent.Add(lockTTL)))
}

// lateAt reports whether the lease is over by either clock: the monotonic one does not count the time in which a virtual machine was suspended.
func (l *lease) lateAt(now time.Time) bool {
	return now.Sub(l.sent) >= lockTTL || now.Round(0).Sub(l.sent.Round(0)) >= lockTTL
}

// Err returns an error if the lease has ended.
func (l *lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lateAt(time.Now()) {
		l.end()
	}
	return l.err()
}
