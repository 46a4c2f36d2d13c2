package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// What the kernel logs while no agent runs, or in its last moments, counts once, when the next one starts; what was there
// before the first start, and what an operator has cleared, does not count again.
func TestXIDsLoggedWhileNoAgentRuns(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*agent){
		"asked to end": func(a *agent) { a.client.Kill() },
		"killed":       (*agent).kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, dir, path := simdriver.StartParallel(t, "h100x8"), shortDir(t), filepath.Join(t.TempDir(), "kmsg")
			seq := 70
			xid := func(slot, code int) {
				t.Helper()
				pci, err := m.Get(slot, "pci")
				if err != nil {
					t.Fatal(err)
				}
				f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = f.Close() }()
				seq++
				if _, err := fmt.Fprintf(f, "4,%d,%d000000,-;NVRM: Xid (PCI:%s): %d, a fault\n", seq, 300*seq, strings.TrimSuffix(pci, ".0"), code); err != nil {
					t.Fatal(err)
				}
			}
			counts := func(a *agent, want string) {
				t.Helper()
				await(a, "counts "+want, patience, func() bool {
					var got []string
					for _, c := range reportOf(a).Counts {
						got = append(got, fmt.Sprintf("%d:%s:%d", c.Index, c.Cause, c.Count))
					}
					return strings.Join(got, " ") == want
				})
			}
			xid(1, 119)
			log := map[string]any{"kernel_log": path}
			a := run(t, m, dir, log)
			a.healthy(8, 8)
			xid(4, 119)
			a.healthy(8, 7)
			a.says("cleared", "clear", "--gpu=4")
			a.healthy(8, 8)
			if err := m.XID(3, 95); err != nil {
				t.Fatal(err)
			}
			a.healthy(8, 7)
			xid(3, 95) // of which the agent learns no more
			await(a, "the history on disk", patience, func() bool {
				text, err := os.ReadFile(filepath.Join(dir, "nomad-gpu.json"))
				return err == nil && strings.Contains(string(text), `"Code": 95`)
			})
			end(a)
			xid(5, 119)
			a = run(t, m, dir, log)
			a.healthy(8, 6)
			counts(a, "3:XID_95:1 4:XID_119:1 5:XID_119:1")
			end(a)
			a = run(t, m, dir, log)
			xid(6, 119)
			a.healthy(8, 5)
			counts(a, "3:XID_95:1 4:XID_119:1 5:XID_119:1 6:XID_119:1")
		})
	}
}
