package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"github.com/tandem-gpu/tandem/test/simdriver"
)

// asAgent is in the environment of a process of this test program that shall be a Nomad agent: the config
// block of its plugin.
const asAgent = "NOMAD_GPU_TEST_AGENT"

// beAgent starts the plugin, opens its streams, says its pid, and waits to be killed.
func beAgent(block string) error {
	keys := map[string]any{}
	if err := json.Unmarshal([]byte(block), &keys); err != nil {
		return err
	}
	cmd := exec.Command(os.Getenv(asAgent + "_BINARY"))
	client := newClient(cmd, hclog.NewNullLogger())
	p, err := dispense(client)
	if err != nil {
		return err
	}
	if err := setConfig(p, keys); err != nil {
		return err
	}
	lists, err := p.Fingerprint(context.Background())
	if err != nil {
		return err
	}
	numbers, err := p.Stats(context.Background(), time.Second)
	if err != nil {
		return err
	}
	fmt.Println(cmd.Process.Pid)
	for {
		select {
		case <-lists:
		case <-numbers:
		}
	}
}

// The agent is killed. Its plugin follows whatever it is doing, and takes its sockets along, although nobody
// reads its log any more.
func TestAgentIsKilled(t *testing.T) {
	t.Parallel()
	for name, hang := range map[string]string{"well": "", "nvmlInit hangs": "nvmlInit", "everything hangs": "*"} {
		t.Run(name, func(t *testing.T) {
			m, dir, tmp := install(t, "h100x8"), shortDir(t), shortDir(t)
			if hang == "nvmlInit" {
				if err := m.Hang(simdriver.All, hang); err != nil {
					t.Fatal(err)
				}
			}
			agent, pid := startAgent(t, tmp, keys(m, dir))
			socket := filepath.Join(dir, "nomad-gpu.sock")
			await(t, "the operator's socket", patience, func() bool {
				_, err := os.Stat(socket)
				return err == nil
			})
			if hang == "" {
				await(t, "a reading", patience, func() bool { // an event before it would be no news
					calls, err := m.Calls()
					return err == nil && calls["nvmlEventSetWait_v2"] > 0
				})
			}
			if hang == "*" {
				if err := m.Hang(simdriver.All, hang); err != nil {
					t.Fatal(err)
				}
			}
			if err := agent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = agent.Wait()
			if hang == "" { // something to say in the log
				if err := m.XID(1, 95); err != nil {
					t.Fatal(err)
				}
			}
			await(t, "the end of the orphan", patience, func() bool { return gone(pid) })
			if left := entries(t, tmp); len(left) > 0 {
				t.Errorf("left in TMPDIR: %v", left)
			}
			if _, err := os.Stat(socket); err == nil {
				t.Error("the operator's socket is left")
			}
			if hang == "" {
				text, err := os.ReadFile(filepath.Join(dir, "nomad-gpu.json"))
				if err != nil || !strings.Contains(string(text), `"Code": 95`) {
					t.Errorf("the last word is missing: %v\n%s", err, text)
				}
			}
		})
	}
}

// startAgent starts a process that is an agent, and returns it with the pid of its plugin.
func startAgent(t *testing.T, tmp string, keys map[string]any) (agent *exec.Cmd, pid int) {
	t.Helper()
	block, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	agent = exec.Command(os.Args[0])
	agent.Env = append(os.Environ(), asAgent+"="+string(block), asAgent+"_BINARY="+binary, "TMPDIR="+tmp)
	agent.Stderr = os.Stderr
	out, err := agent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscan(line, &pid); err != nil {
		t.Fatal(err)
	}
	return agent, pid
}
