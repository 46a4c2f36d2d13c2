package main

import (
	"os"
	"testing"

	"go.yaml.in/yaml/v3"
)

// The DaemonSet gives the agent nothing that it refuses, and mounts what it looks for.
func TestDaemonSet(t *testing.T) {
	text, err := os.ReadFile("../../deploy/daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						Args         []string
						Env          []struct{ Name, Value string }
						VolumeMounts []struct {
							MountPath string `yaml:"mountPath"`
						} `yaml:"volumeMounts"`
					}
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	c := d.Spec.Template.Spec.Containers[0]
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	s, err := resolveAll(t, c.Args, env, "")
	if err != nil {
		t.Fatal(err)
	}
	if len(s.notes) > 0 {
		t.Errorf("settings without effect: %v", s.notes)
	}
	mounts := map[string]bool{}
	for _, m := range c.VolumeMounts {
		mounts[m.MountPath] = true
	}
	if !mounts["/var/lib/kubelet/device-plugins"] || !mounts[s.containerRoot] || !mounts[s.health.StateDir] {
		t.Errorf("mounts %v", mounts)
	}
	if s.httpAddress != ":9410" {
		t.Errorf("probes go to 9410, the agent listens on %s", s.httpAddress)
	}
}
