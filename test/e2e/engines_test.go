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

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// engine is a program that runs containers by order of its command line.
type engine []string

// startDocker starts dockerd with Debian's containerd and without a network, and returns its client.
func startDocker(t *testing.T) engine {
	t.Helper()
	socket, data := "unix://"+stateDir()+"/docker.sock", stateDir()+"/docker"
	daemon := start(t, "dockerd", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, "/usr/sbin/dockerd", "--host="+socket,
		"--data-root="+data, "--exec-root="+data+"-run", "--pidfile="+data+".pid", "--storage-driver=vfs",
		"--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
	docker := engine{"/usr/bin/docker", "--host=" + socket}
	await(t, "dockerd", 30*time.Second, func() error { return errors.Join(docker.try("version"), daemon.alive()) })
	return docker
}

// newPodman returns Podman's command line with storage of the test's own. Debian's crun has no support for a machine with both
// versions of control groups; runc has.
func newPodman() engine {
	return engine{
		"podman", "--root=" + stateDir() + "/podman", "--runroot=" + stateDir() + "/podman-run", "--runtime=runc",
		"--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=none",
	}
}

func (e engine) try(argv ...string) error {
	_, err := command(slices.Concat(e, argv)...)
	return err
}

// probe runs the probe in a container.
func (e engine) probe(t *testing.T, m *simdriver.Machine, options ...string) seen {
	t.Helper()
	argv := slices.Concat(e, []string{"run", "--rm", "--network=none", "--cap-add=MKNOD"}, options,
		[]string{"localhost/probe:1", "/usr/bin/probe", "once", "libcuda.so.1", "NVIDIA_VISIBLE_DEVICES"}, numbers(t, m))
	s, err := parseSeen(must(t, argv...))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s %s: %v", e[0], strings.Join(options, " "), s)
	return s
}

// task is a Nomad job with one task that runs the probe.
type task struct {
	name, driver string
	config       string   // beside the command
	more         string   // in the task
	devices      []string // what each device block asks for
	volume       bool     // it mounts a host volume with a file "volume" where the probe lists mounts
}

// engineConfig is the configuration of a Nomad agent whose tasks have the probe and Java in their file system, where the driver
// makes one, and whose driver "docker" uses the test's dockerd.
func engineConfig(t *testing.T) string {
	t.Helper()
	const jvm = "/usr/lib/jvm/java-17-openjdk-amd64"
	probe := buildProbe(t)
	files := map[string]string{ // and where each is for the task
		probe: "/usr/bin/probe", jvm: jvm, "/etc/java-17-openjdk": "/etc/java-17-openjdk",
		"/etc/passwd": "/etc/passwd", // in which Nomad 1.10 looks the user up
	}
	for _, program := range []string{probe, jvm + "/bin/java", jvm + "/lib/server/libjvm.so"} {
		for _, library := range linked(t, program) {
			file, err := filepath.EvalSymlinks(library) // Nomad copies a symbolic link as it is
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(file, jvm) {
				files[file] = library
			}
		}
	}
	var chroot []string
	for file, target := range files {
		chroot = append(chroot, fmt.Sprintf("%q = %q", file, target))
	}
	write(t, "volume/volume", nil)
	return render(t, "nomad-engines.hcl", map[string]string{"CHROOT": sorted(chroot), "STATE": stateDir()})
}

func (a *agent) runProbe(t *testing.T, m *simdriver.Machine, run task) {
	t.Helper()
	config, memory, command := run.config, "64", probeCommand(t, m)
	switch run.driver {
	case "exec", "docker":
		config += fmt.Sprintf("\ncommand = %q\nargs = %s", command[0], list(command[1:]))
	case "java":
		config, memory = config+"\nargs = "+list(command), "512"
	}
	devices, volume, more := "", "", run.more
	if run.volume {
		volume = `volume "files" {
      type = "host"
      source = "files"
    }`
		more += `volume_mount {
        volume = "files"
        destination = "` + mountFolder + `"
      }`
	}
	for _, name := range run.devices {
		devices += fmt.Sprintf("device %q {}\n", name)
	}
	file := render(t, "probe.nomad.hcl", map[string]string{
		"NAME": run.name, "DRIVER": run.driver, "CONFIG": config, "DEVICES": devices, "VOLUME": volume, "MORE": more, "MEMORY": memory,
	})
	own := filepath.Join(stateDir(), run.name+".nomad.hcl")
	if err := os.Rename(file, own); err != nil {
		t.Fatal(err)
	}
	must(t, "nomad", "job", "run", "-address="+nomadAPI, "-detach", own)
}

// awaitProbe waits until the job's task has printed what it can do, and returns that and the devices that Nomad chose.
func (a *agent) awaitProbe(t *testing.T, job string) (ids []string, s seen) {
	t.Helper()
	await(t, "job "+job+" to print what it can do", 60*time.Second, func() error {
		alloc, err := a.allocation(job)
		if err != nil {
			return err
		}
		if alloc.ClientStatus != "running" {
			return fmt.Errorf("it is %s: %+v", alloc.ClientStatus, alloc.TaskStates)
		}
		ids = alloc.devices()
		s, err = parseOr(alloc.log("gpus", "stdout"))
		return err
	})
	t.Logf("job %s has %q and sees %v", job, ids, s)
	return ids, s
}
