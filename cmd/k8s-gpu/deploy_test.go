package main

import (
	"os"
	"testing"
	"time"

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
			UpdateStrategy struct {
				RollingUpdate struct {
					MaxUnavailable int  `yaml:"maxUnavailable"`
					MaxSurge       *int `yaml:"maxSurge"`
				} `yaml:"rollingUpdate"`
			} `yaml:"updateStrategy"`
			Template struct {
				Spec struct {
					Grace      int `yaml:"terminationGracePeriodSeconds"`
					Containers []struct {
						Lifecycle     any
						LivenessProbe struct {
							PeriodSeconds    int `yaml:"periodSeconds"`
							TimeoutSeconds   int `yaml:"timeoutSeconds"`
							FailureThreshold int `yaml:"failureThreshold"`
						} `yaml:"livenessProbe"`
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
	if grace := time.Duration(d.Spec.Template.Spec.Grace) * time.Second; grace < 2*stopAtMost || c.Lifecycle != nil {
		t.Errorf("%v to stop in, lifecycle %v; it takes %v and needs no help", grace, c.Lifecycle, stopAtMost)
	}
	probe, reload := c.LivenessProbe, stopAtMost+between
	if unheard := reload + time.Duration(probe.TimeoutSeconds)*time.Second; time.Duration(probe.PeriodSeconds*(probe.FailureThreshold-1))*time.Second < unheard {
		t.Errorf("liveness probe %+v ends an agent that reloads, which takes %v", probe, reload)
	}
	if r := d.Spec.UpdateStrategy.RollingUpdate; r.MaxUnavailable != 1 || r.MaxSurge == nil || *r.MaxSurge != 0 {
		t.Errorf("rolling update %+v: want one after the other", r)
	}
	if s.httpAddress != ":9410" {
		t.Errorf("probes go to 9410, the agent listens on %s", s.httpAddress)
	}
}
