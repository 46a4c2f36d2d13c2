package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/tandem-gpu/tandem/test/hardware/compare"
)

const (
	nomadGPU = "nomad-gpu"
	k8sGPU   = "k8s-gpu"
)

var agents = []string{nomadGPU, k8sGPU}

// queries are all commands of nvidia-smi that are run, by querySMI: each prints. Options that change a GPU (-pm, -mig, -r, -pl, -lgc, -c, -e,
// mig -cgi and so on) are in none of them.
var queries = map[string][]string{
	"nvidia-smi.xml": {"-q", "-x"},
	"list.txt":       {"-L"},
	"query.csv":      {"--query-gpu=" + strings.Join(compare.QueryFields, ","), "--format=csv,noheader,nounits"},
	"nvlink.txt":     {"nvlink", "-s"},
	"topology.txt":   {"topo", "-m"},
	"mig.txt":        {"mig", "-lgi"},
}

// verbs are all commands of the agents that are run. Quiesce and resume concern the agents of this run, by their own control sockets.
var verbs = []string{"inspect", "doctor", "quiesce", "resume", "prove-gpu"}

// errNotAllowed is the error of a command that is none of verbs.
var errNotAllowed = errors.New("not a command of this program")

// find returns the path of a program.
func find(name string) (string, error) { return exec.LookPath(name) }

// verb runs a command of an agent.
func (o options) verb(ctx context.Context, agent, stateDir string, args ...string) (string, error) {
	if !slices.Contains(agents, agent) || !slices.Contains(verbs, args[0]) {
		return "", fmt.Errorf("%s %s: %w", agent, args[0], errNotAllowed)
	}
	global := []string{
		args[0], "--state-dir", stateDir, "--driver-root", o.roots.Driver, "--dev-root", o.roots.Dev, "--sysfs-root", o.roots.Sys,
		"--procfs-root", o.roots.Proc, "--mig-strategy", "mixed",
	}
	return output(ctx, filepath.Join(o.bin, agent), append(global, args[1:]...)...)
}

// output runs a program for at most a minute. An error has what it printed to standard error.
func output(ctx context.Context, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
	}
	if err != nil {
		err = fmt.Errorf("%s %s: %w", filepath.Base(program), strings.Join(args, " "), err)
	}
	return string(out), err
}

// querySMI runs all queries. What fails is empty, and its error is returned.
func (o options) querySMI(ctx context.Context) (files map[string]string, errs []error) {
	files = map[string]string{}
	for name, args := range queries {
		text, err := output(ctx, o.smi, args...)
		if err != nil && !strings.Contains(text, "No MIG-enabled devices found") {
			errs = append(errs, err)
		}
		files[name] = text
	}
	return files, errs
}

// smiOf are the outputs that are compared.
func smiOf(files map[string]string) compare.SMI {
	return compare.SMI{
		XML: files["nvidia-smi.xml"], List: files["list.txt"], Query: files["query.csv"], NVLink: files["nvlink.txt"], Topo: files["topology.txt"],
	}
}
