//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestInstallNomad does on a fresh Debian what docs/install.md describes for a Nomad client: packages are installed, upgraded under a
// running job, rolled back, removed and purged, and then the zip is installed. What stays after each step is what the document describes.
func TestInstallNomad(t *testing.T) {
	doc := readInstallDocument(t)
	m := bootFresh(t, asNomadClient(t))
	sh, nomad := m.shell(), &agent{owner: t, name: "machine", process: m.process}
	nomad.awaitReady(t)
	nomad.awaitGPUs(t, 0, 0)

	step(t, "the package is installed", func(t *testing.T) {
		sh.follow(t, doc.block(t, "nomad", "sh", 0), "H100 80GB HBM3")
		nomad.awaitGPUs(t, 8, 8)
	})
	const daemons = "nomad-gpu-mps-daemon"
	step(t, "the service of the MPS daemons is enabled", func(t *testing.T) {
		sh.follow(t, doc.block(t, "nomad", "sh", 1), "")
		sh.must(t, "systemctl is-enabled "+daemons)
	})
	var was string
	step(t, "the document's job runs", func(t *testing.T) {
		if err := os.WriteFile(m.root+releaseFolder+"/train.nomad.hcl", []byte(doc.block(t, "nomad", "hcl", 0)), 0o644); err != nil {
			t.Fatal(err)
		}
		sh.must(t, "nomad job run -detach train.nomad.hcl")
		was = nomad.awaitTrain(t)
		alloc, err := nomad.allocation("train")
		if err != nil {
			t.Fatal(err)
		}
		if got := alloc.devices(); len(got) != 2 {
			t.Errorf("it got the GPUs %q, want two", got)
		}
		shown := sh.must(t, "nomad alloc logs "+alloc.ID)
		if !strings.Contains(shown, "NVIDIA_VISIBLE_DEVICES=") {
			t.Errorf("its environment has no GPUs: %s", shown)
		}
	})
	const block, mine = "/etc/nomad.d/nomad-gpu.hcl", "# mine"
	sh.must(t, "echo '"+mine+"' >> "+block)
	for _, version := range []struct{ section, want string }{{"nomad-upgrade", nextVersion}, {"nomad-roll-back", version}} {
		step(t, version.section, func(t *testing.T) {
			sh.follow(t, doc.block(t, version.section, "sh", 0), "healthy")
			nomad.awaitReady(t)
			nomad.awaitGPUs(t, 8, 8)
			m.awaitPlugin(t, "/usr/bin/nomad-gpu", version.want)
			if is := nomad.awaitTrain(t); is != was {
				t.Errorf("job train was %s, is %s", was, is)
			}
			sh.must(t, "grep -x '"+mine+"' "+block)
		})
	}
	step(t, "the package is removed", func(t *testing.T) {
		remove, restart, purge := nthLine(t, doc, 0), nthLine(t, doc, 1), nthLine(t, doc, 2)
		sh.must(t, "nomad job stop -detach -purge train") // "drain the node first"
		sh.must(t, "systemctl is-active "+daemons)
		sh.must(t, "systemctl show --property=NRestarts "+daemons+" | grep -x NRestarts=0") // it did not fail
		sh.must(t, remove+restart)
		nomad.awaitReady(t)
		nomad.awaitGPUs(t, 0, 0)
		sh.must(t, "! systemctl is-active "+daemons)
		m.wantFiles(t, "/etc/nomad.d/nomad-gpu.hcl", "/var/lib/tandem/agents", "/var/lib/tandem/nomad-gpu.groups.json", "/var/lib/tandem/nomad-gpu.json")
		sh.must(t, purge)
		m.wantFiles(t)
	})
	step(t, "the zip is installed, twice", func(t *testing.T) {
		for range 2 { // the second time in the place of a plugin that runs
			sh.follow(t, doc.block(t, "nomad-without-a-package", "sh", 0), "H100 80GB HBM3")
			nomad.awaitGPUs(t, 8, 8)
		}
		m.awaitPlugin(t, "/opt/nomad/data/plugins/nomad-gpu", version)
	})
	doc.checkUsed(t, "nomad")
}

// asNomadClient makes a machine what HashiCorp's Nomad package makes it, with the files of a release beside.
func asNomadClient(t *testing.T) func(root string) {
	t.Helper()
	return func(root string) {
		must(t, "cp", "-r", root+"/srv/nomad/etc", root+"/srv/nomad/usr", root+"/")
		nomad := must(t, "which", "nomad")
		must(t, "cp", nomad, root+"/usr/bin/nomad")
		must(t, "cp", "testdata/fresh.hcl", root+"/etc/nomad.d/")
		must(t, "mkdir", "-p", root+"/opt/nomad/data", root+"/etc/systemd/system/multi-user.target.wants")
		must(t, "ln", "-s", "/usr/lib/systemd/system/nomad.service", root+"/etc/systemd/system/multi-user.target.wants/")
		must(t, "cp", "-r", os.Getenv("E2E_SHIPPED"), root+releaseFolder)
	}
}

// nthLine is a line of what the document has for the removal.
func nthLine(t *testing.T, doc installDocument, n int) string {
	t.Helper()
	lines := slices.Collect(strings.Lines(doc.block(t, "nomad-remove", "sh", 0)))
	if len(lines) != 3 {
		t.Fatalf("the removal has %d lines, want three", len(lines))
	}
	return lines[n]
}

// awaitTrain waits until job train runs, and returns what stays while it does.
func (a *agent) awaitTrain(t *testing.T) (identity string) {
	t.Helper()
	await(t, "job train", 60*time.Second, func() error {
		alloc, err := a.allocation("train")
		if err == nil && alloc.ClientStatus != "running" {
			err = fmt.Errorf("it is %s: %+v", alloc.ClientStatus, alloc.TaskStates)
		}
		identity = alloc.identity()
		return err
	})
	return identity
}

// awaitPlugin waits until the program of the one nomad-gpu that runs is this file, of this version.
func (m *freshMachine) awaitPlugin(t *testing.T, path, version string) {
	t.Helper()
	await(t, "nomad-gpu "+version, 30*time.Second, func() error {
		for pid := range running("nomad-gpu") {
			program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			if err == nil && program != path {
				err = fmt.Errorf("process %d runs %s", pid, program)
			}
			return errors.Join(err, onlyPlugin(pid))
		}
		return errors.New("none runs")
	})
	if shown := m.shell().must(t, path+" --version"); !strings.Contains(shown, version) {
		t.Errorf("%s --version: %s; want %s", path, shown, version)
	}
}

// wantFiles fails unless these are the files of nomad-gpu that the machine has.
func (m *freshMachine) wantFiles(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for _, pattern := range []string{"/usr/bin/nomad-gpu", "/opt/nomad/data/plugins/*", "/etc/nomad.d/nomad-gpu*", "/usr/share/doc/tandem*", "/var/lib/tandem/*"} {
		found, err := filepath.Glob(m.root + pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range found {
			got = append(got, strings.TrimPrefix(path, m.root))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("the machine has %q, want %q", got, want)
	}
}
