//go:build e2e

package e2e

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	goruntime "runtime" // the package has a type runtime
	"syscall"
	"testing"
	"time"
)

// installJob is deploy/nomad/install.nomad.hcl with a server of releases.
type installJob struct {
	*agent
	releases *httptest.Server
	files    map[string][]byte // by path: zips
	folder   string            // plugin_dir
	config   string            // config_file
}

// add gives the server a release with a program, and returns its checksum.
func (j *installJob) add(t *testing.T, version string, program []byte) (sum string) {
	t.Helper()
	var packed bytes.Buffer
	w := zip.NewWriter(&packed)
	file, err := w.Create("nomad-gpu")
	if err == nil {
		_, err = file.Write(program)
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	j.files[fmt.Sprintf("/v%s/nomad-gpu_%s_linux_%s.zip", version, version, goruntime.GOARCH)] = packed.Bytes()
	return fmt.Sprintf("%x", sha256.Sum256(packed.Bytes()))
}

// run submits the job, and waits until its allocation has the status.
func (j *installJob) run(t *testing.T, version, sum, status string) {
	t.Helper()
	var before, after struct{ Version int }
	before.Version = -1
	_ = j.get("/v1/job/install-nomad-gpu", &before) // there is none at first
	must(t, "nomad", "job", "run", "-address="+nomadAPI, "-detach", "-var=version="+version,
		fmt.Sprintf(`-var=sha256={%q: %q}`, goruntime.GOARCH, sum), "-var=source="+j.releases.URL, "-var=plugin_dir="+j.folder, "-var=config_file="+j.config,
		deployed+"/install.nomad.hcl")
	await(t, fmt.Sprintf("the installation of %s to be %s", version, status), 60*time.Second, func() error {
		if err := j.get("/v1/job/install-nomad-gpu", &after); err != nil {
			return err
		}
		if after.Version == before.Version {
			return fmt.Errorf("the job is of version %d", after.Version)
		}
		var allocs []struct {
			allocation
			JobVersion int
		}
		if err := j.get("/v1/job/install-nomad-gpu/allocations", &allocs); err != nil {
			return err
		}
		for _, alloc := range allocs {
			if alloc.JobVersion == after.Version && alloc.ClientStatus == status {
				return nil
			}
		}
		return fmt.Errorf("its allocations are %+v", allocs)
	})
}

// checkFile compares the plugin in plugin_dir, its mode and owner; there is nothing beside it. Without a program there is no file.
func (j *installJob) checkFile(t *testing.T, want []byte) {
	t.Helper()
	entries, _ := os.ReadDir(j.folder)
	if want == nil {
		if len(entries) > 0 {
			t.Errorf("the folder has %v", entries)
		}
		return
	}
	info, err := os.Lstat(j.folder + "/nomad-gpu")
	if err != nil || len(entries) != 1 {
		t.Fatalf("%v; the folder has %v", err, entries)
	}
	if stat := info.Sys().(*syscall.Stat_t); info.Mode() != 0o755 || stat.Uid != 0 || stat.Gid != 0 {
		t.Errorf("the file is %v of %d:%d", info.Mode(), stat.Uid, stat.Gid)
	}
	if got, err := os.ReadFile(j.folder + "/nomad-gpu"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the file has %d bytes, want %d; %v", len(got), len(want), err)
	}
}

// TestNomadInstallJob installs the plugin on a client that has none, upgrades it and rolls it back, by the job that deploy/nomad has for it.
func TestNomadInstallJob(t *testing.T) {
	m := install(t, "h100x8")
	j := &installJob{files: map[string][]byte{}, folder: filepath.Join(stateDir(), "plugins"), config: filepath.Join(stateDir(), "new/nomad-gpu.hcl")}
	j.releases = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if file, ok := j.files[r.URL.Path]; ok {
			_, _ = w.Write(file)
		} else {
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(j.releases.Close)
	program, err := os.ReadFile(binary("nomad-gpu"))
	if err != nil {
		t.Fatal(err)
	}
	next, err := os.ReadFile(nextPlugin(t))
	if err != nil {
		t.Fatal(err)
	}
	const broken = "99.0.0"
	version, newVersion := versionOf(binary("nomad-gpu")), versionOf(nextPlugin(t))
	first, second, third := j.add(t, version, program), j.add(t, newVersion, next), j.add(t, broken, []byte("#!/bin/sh\nexit 127\n"))

	j.agent = launchClient(t, "nomad", onMachine(m, "nomad-history", ""), write(t, "plugins.hcl", []byte(`plugin_dir = "`+j.folder+`"`)))
	j.awaitReady(t)
	step(t, "a wrong checksum installs nothing", func(t *testing.T) {
		j.run(t, version, second, "failed")
		j.checkFile(t, nil)
	})
	step(t, "the plugin and its block are installed", func(t *testing.T) {
		j.run(t, version, first, "complete")
		j.checkFile(t, program)
		must(t, binary("nomad-gpu"), "validate", "--nomad-config", j.config)
		if len(running("nomad-gpu")) > 0 {
			t.Error("Nomad runs the plugin before it was restarted: deploy/nomad/README.md is wrong")
		}
		j.restart(t)
		j.awaitReady(t)
		j.awaitGPUs(t, 8, 8)
	})
	step(t, "a program that does not start replaces nothing", func(t *testing.T) {
		j.run(t, broken, third, "failed")
		j.checkFile(t, program)
	})
	step(t, "an upgrade counts when the plugin's process ends", func(t *testing.T) {
		pid := j.plugin()
		j.run(t, newVersion, second, "complete")
		j.checkFile(t, next)
		if now := j.plugin(); now != pid {
			t.Errorf("the plugin is process %d, was %d before its file was replaced", now, pid)
		}
		j.killPlugin(t)
		j.awaitVersion(t, newVersion)
		j.awaitGPUs(t, 8, 8)
	})
	step(t, "a rollback counts when the client is restarted", func(t *testing.T) {
		j.run(t, version, first, "complete")
		j.checkFile(t, program)
		j.restart(t)
		j.awaitVersion(t, version)
		j.awaitGPUs(t, 8, 8)
	})
	checkDriver(t, m)
}
