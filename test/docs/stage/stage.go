// Package stage is a simulated machine on which both agents run, for the commands of the documents: each is run as it is written, with
// the paths and addresses of a real machine replaced by those of the stage.
package stage

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/internal/core"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubelettest"
	"github.com/tandem-gpu/tandem/test/rig"
	"github.com/tandem-gpu/tandem/test/simdriver"
)

// Stage is a machine with the agents on it. Make one with New.
type Stage struct {
	Dir     string // of all files
	Machine *simdriver.Machine
	Pods    *kubelettest.PodResources // nil until StartKubernetes
	bin     string

	nomad    *rig.Nomad
	nomadAPI *httptest.Server
	kubelet  *rig.Kubelet
	log      *os.File
}

// New lays out a machine in dir, whose path must be short (a socket's has at most 107 bytes). bin is the folder of the agents. The
// machine "" has no GPU and no driver.
func New(ctx context.Context, dir, bin, machine string) (_ *Stage, err error) {
	m := &simdriver.Machine{Root: filepath.Join(dir, "machine")}
	if machine == "" {
		err = errors.Join(os.MkdirAll(m.Root+"/proc/sys/kernel/random", 0o755), os.MkdirAll(m.Root+"/sys/bus/pci/devices", 0o755))
		err = errors.Join(err, os.WriteFile(m.Root+"/proc/sys/kernel/random/boot_id", []byte("5eed0000-0000-4000-8000-000000000000\n"), 0o644))
	} else {
		m, err = simdriver.Install(ctx, m.Root, machine)
	}
	if err != nil {
		return nil, err
	}
	s := &Stage{Dir: dir, Machine: m, bin: bin}
	for _, folder := range []string{"etc/tandem", "etc/nomad.d", "var/lib/tandem", "var/lib/kubelet/pod-resources", "var/run/cdi"} {
		if err := os.MkdirAll(filepath.Join(dir, folder), 0o755); err != nil {
			return nil, err
		}
	}
	s.log, err = os.Create(filepath.Join(dir, "agents.log"))
	return s, err
}

// StartKubernetes starts k8s-gpu beside a small kubelet, whose pod-resources API is s.Pods. Health checks and recovery take seconds.
func (s *Stage) StartKubernetes(ctx context.Context) (err error) {
	setup := s.setup()
	setup.PodResources = s.Dir + podResources
	if s.Pods, err = kubelettest.ServePodResources(setup.PodResources); err != nil {
		return err
	}
	if s.kubelet, err = rig.StartKubelet(s.Dir, filepath.Join(s.bin, "k8s-gpu"), setup, s.log); err != nil {
		return err
	}
	return s.kubelet.AwaitView(ctx, "the devices", func(v map[string]rig.View) bool { return len(v) > 0 })
}

// StartNomad starts nomad-gpu under a small Nomad client without allocations, as StartKubernetes.
func (s *Stage) StartNomad(ctx context.Context) (err error) {
	s.nomadAPI = httptest.NewServer(http.HandlerFunc(serveNoAllocations))
	setup := s.setup()
	setup.NomadAddress = s.nomadAPI.URL
	if s.nomad, err = rig.StartNomad(ctx, filepath.Join(s.bin, "nomad-gpu"), setup, s.log); err != nil {
		return err
	}
	if err = s.nomad.Await(ctx, "the devices", func(v map[string]rig.View) bool { return len(v) > 0 }); err != nil {
		return err
	}
	return s.awaitOwners(ctx)
}

// awaitOwners waits until inspect has no line about owners that are not known: the agent has read the allocations.
func (s *Stage) awaitOwners(ctx context.Context) error {
	for range 100 {
		shown, err := s.Run(ctx, "nomad-gpu inspect")
		if err != nil || !strings.Contains(shown.Output, "owners") {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return errors.New("the owners of the devices are not known")
}

// serveNoAllocations is what the agent reads of a Nomad agent's API. Nothing changes, so a query that waits is answered when it ends.
func serveNoAllocations(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == "/v1/agent/self":
		fmt.Fprint(w, `{"stats":{"client":{"node_id":"f7476465"}}}`)
	case strings.HasPrefix(r.URL.Path, "/v1/acl/"):
		http.Error(w, "ACL support disabled", http.StatusBadRequest)
	case r.URL.Query().Get("index") == "7":
		<-r.Context().Done()
	default:
		w.Header().Set("X-Nomad-Index", "7")
		fmt.Fprint(w, "[]")
	}
}

func (s *Stage) setup() rig.Setup {
	return rig.Setup{
		Roots:    core.Roots{Driver: s.Machine.Root, Dev: s.Machine.Root, Sys: s.Machine.Root + "/sys", Proc: s.Machine.Root + "/proc"},
		StateDir: filepath.Join(s.Dir, "var/lib/tandem"), Hasty: true,
	}
}

// Stop ends the agents.
func (s *Stage) Stop() (err error) {
	if s.nomad != nil {
		s.nomad.Stop()
		s.nomadAPI.CloseClientConnections()
		s.nomadAPI.Close()
	}
	if s.kubelet != nil {
		err = s.kubelet.End()
		s.Pods.Close()
	}
	return errors.Join(err, s.log.Close())
}

// Result is how a command ended.
type Result struct {
	Output string // stdout and stderr, with the paths as the documents have them
	Code   int    // exit code
}

// agent is the beginning of a command of ours.
var agent = regexp.MustCompile(`^(nomad-gpu|k8s-gpu)( |$)`)

// IsOurs reports whether a command starts one of the agents' binaries.
func IsOurs(command string) bool { return agent.MatchString(command) }

// Run runs a command of ours on the stage. It fails if the command could not be run; an exit code is no failure.
func (s *Stage) Run(ctx context.Context, command string) (Result, error) {
	command, stdin, _ := strings.Cut(command, "\n")
	command = strings.TrimSuffix(command, hereDocument)
	words := strings.Fields(s.onStage(command))
	if !IsOurs(command) || strings.ContainsAny(command, "\"'$|;&<>") {
		return Result{}, fmt.Errorf("%q is no simple command of an agent", command)
	}
	root := s.Machine.Root
	args := []string{
		"--driver-root=" + root, "--dev-root=" + root, "--sysfs-root=" + root + "/sys", "--procfs-root=" + root + "/proc",
		"--state-dir=" + filepath.Join(s.Dir, "var/lib/tandem"), "--cdi-dir=" + filepath.Join(s.Dir, "var/run/cdi"),
	}
	if words[0] == "k8s-gpu" {
		args = append(args, "--driver-root-ctr-path="+root, "--kubelet-socket=", "--pod-resources-socket="+s.Dir+podResources, "--http-address=")
	}
	c := exec.CommandContext(ctx, filepath.Join(s.bin, words[0]), append(args, words[1:]...)...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) } // an agent that is started without a verb runs until ctx ends
	c.WaitDelay = 10 * time.Second
	var out bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = strings.NewReader(stdin), &out, &out
	err := c.Run()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited && ctx.Err() == nil {
		return Result{}, err
	}
	return Result{s.asWritten(out.String()), c.ProcessState.ExitCode()}, nil
}

// Get returns the response to a GET of a path of k8s-gpu's HTTP server, and fails unless it is 200.
func (s *Stage) Get(ctx context.Context, path string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.kubelet.Address()+path, nil)
	if err != nil {
		return "", err
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, text)
	}
	return s.asWritten(string(text)), err
}

// mapped are the folders of a real machine that the stage has elsewhere.
var mapped = []string{"/etc/tandem", "/etc/nomad.d", "/var/lib/tandem", "/var/lib/kubelet/pod-resources", "/var/run/cdi"}

const podResources = "/var/lib/kubelet/pod-resources/kubelet.sock"

func (s *Stage) onStage(text string) string {
	for _, folder := range mapped {
		text = strings.ReplaceAll(text, folder, s.Dir+folder)
	}
	return text
}

func (s *Stage) asWritten(text string) string {
	text = strings.ReplaceAll(text, s.Machine.Root+"/", "/")
	text = strings.ReplaceAll(text, s.Machine.Root, "/")
	return strings.ReplaceAll(text, s.Dir, "")
}

// hereDocument is the end of a command whose input follows, up to a line END.
const hereDocument = " <<'END'"

// Commands returns the commands of a block of a shell, without comments: one a line, unless a line ends with \. A here-document is part of
// its command, after a line break.
func Commands(block string) (commands []string) {
	within := false
	for line := range strings.Lines(strings.ReplaceAll(block, "\\\n", " ")) {
		if within {
			if within = strings.TrimSpace(line) != "END"; within {
				commands[len(commands)-1] += line
			}
			continue
		}
		line, _, _ = strings.Cut(cmp.Or(line, "\n"), " #")
		if line = strings.Join(strings.Fields(line), " "); line != "" && !strings.HasPrefix(line, "#") {
			if within = strings.HasSuffix(line, hereDocument); within {
				line += "\n"
			}
			commands = append(commands, line)
		}
	}
	return commands
}
