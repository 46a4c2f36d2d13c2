package cdi

import (
	"testing"

	"github.com/tandem-gpu/tandem/internal/core/coretest"
)

func TestFirst(t *testing.T) {
	n, m := newNode(t), newMonitor(required())
	n.run(t, m)
	m.read(coretest.GPUs(2))
	s := m.defined(t, ids(0, 1)...)
	t.Logf("%+v", s.Host.CDI)
	t.Logf("%+v", n.spec(t))
}
