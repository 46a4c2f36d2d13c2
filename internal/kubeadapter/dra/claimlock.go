package dra

import (
	"context"
	"sync"
)

// claimLocks has one lock for each claim that a call works on.
type claimLocks struct {
	mu    sync.Mutex
	locks map[string]*claimLock // by UID
}

type claimLock struct {
	token chan struct{} // capacity 1: has the lock
	users int           // that have it or wait for it
}

// lock waits for the lock of a claim until ctx ends. release must be called if it succeeds.
func (l *claimLocks) lock(ctx context.Context, uid string) (release func(), err error) {
	one := l.enter(uid)
	select {
	case one.token <- struct{}{}:
		return func() { <-one.token; l.leave(uid, one) }, nil
	case <-ctx.Done():
		l.leave(uid, one)
		return nil, ctx.Err()
	}
}

// tryLock takes the lock if no call has it; release is nil otherwise.
func (l *claimLocks) tryLock(uid string) (release func()) {
	one := l.enter(uid)
	select {
	case one.token <- struct{}{}:
		return func() { <-one.token; l.leave(uid, one) }
	default:
		l.leave(uid, one)
		return nil
	}
}

func (l *claimLocks) enter(uid string) *claimLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = map[string]*claimLock{}
	}
	one := l.locks[uid]
	if one == nil {
		one = &claimLock{token: make(chan struct{}, 1)}
		l.locks[uid] = one
	}
	one.users++
	return one
}

func (l *claimLocks) leave(uid string, one *claimLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.locks, uid)
	}
}
