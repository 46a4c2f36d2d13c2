package podresources

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tandem-gpu/tandem/test/check"
)

// The age of a kubelet is that of its socket while the wall clock was steady since it started, and else the time for which it was seen.
func TestAges(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "kubelet.sock")
	check.NoError(t, os.WriteFile(socket, nil, 0o600))
	for name, c := range map[string]struct {
		uptime time.Duration // of the machine; 0 = not known
		age    time.Duration // of the socket by the wall clock
		want   time.Duration
	}{
		"an hour":                         {24 * time.Hour, time.Hour, time.Hour},
		"just started":                    {24 * time.Hour, time.Second, time.Second},
		"of the future":                   {24 * time.Hour, -time.Hour, 0},
		"a machine that has just started": {4 * time.Minute, time.Hour, 0},
		"an uptime that is not known":     {0, time.Hour, time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				touch := func(age time.Duration) {
					at := time.Now().Add(-age)
					check.NoError(t, os.Chtimes(socket, at, at))
				}
				touch(c.age)
				a := ages{uptime: func() (time.Duration, bool) { return c.uptime, c.uptime > 0 }}
				if age, _ := a.of(socket); age != c.want {
					t.Errorf("age %v, want %v", age, c.want)
				}
				time.Sleep(time.Minute)
				if age, _ := a.of(socket); age != c.want+time.Minute {
					t.Errorf("age %v a minute later, want %v", age, c.want+time.Minute)
				}
				touch(10 * time.Second) // the next kubelet
				if age, _ := a.of(socket); age != 10*time.Second {
					t.Errorf("age of the next kubelet %v, want 10s", age)
				}
			})
		})
	}
}

// After a step of the wall clock the modification time of a new socket does not count.
func TestAgeAfterAStep(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	check.NoError(t, os.WriteFile(socket, nil, 0o600))
	synctest.Test(t, func(t *testing.T) {
		a := ages{}
		a.of(socket)
		time.Sleep(time.Minute)
		a.wall = a.wall.Add(-time.Hour) // the clock is an hour ahead of what it was
		at := time.Now().Add(-30 * time.Minute)
		check.NoError(t, os.Chtimes(socket, at, at))
		if age, _ := a.of(socket); age != 0 {
			t.Errorf("age %v, want 0", age)
		}
	})
}
