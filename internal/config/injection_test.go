package config

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-gpu/tandem/internal/core/inventory"
)

// What each strategy means, in the three spellings, and with device nodes.
func TestStrategies(t *testing.T) {
	for _, c := range []struct {
		text  string
		file  string // "" = the same text
		nodes bool
		want  Strategies
		core  inventory.Injection
		notes int
	}{
		{text: "envvar", want: Strategies{EnvVar: true}, core: inventory.Injection{Name: "envvar", Runtime: true}},
		{text: "envvar", nodes: true, want: Strategies{EnvVar: true}, core: inventory.Injection{Name: "envvar", Runtime: true, Nodes: true}},
		{text: "volume-mounts, envvar", file: "[volume-mounts, envvar]", want: Strategies{EnvVar: true, VolumeMounts: true},
			core: inventory.Injection{Name: "envvar,volume-mounts", Runtime: true}},
		{text: "cdi-cri", nodes: true, want: Strategies{CDICRI: true}, core: inventory.Injection{Name: "cdi-cri", CDI: inventory.CDIRequired}, notes: 1},
		{text: "cdi-cri,cdi-annotations,cdi-cri", file: "[cdi-cri, cdi-annotations]", want: Strategies{CDICRI: true, CDIAnnotations: true},
			core: inventory.Injection{Name: "cdi-annotations,cdi-cri", CDI: inventory.CDIRequired}},
		{text: "cdi-annotations,volume-mounts", file: "[cdi-annotations, volume-mounts]", nodes: true,
			want: Strategies{CDIAnnotations: true, VolumeMounts: true},
			core: inventory.Injection{Name: "volume-mounts,cdi-annotations", Runtime: true, Nodes: true, CDI: inventory.CDIRequired}},
		{text: "auto", nodes: true, want: Strategies{Auto: true},
			core: inventory.Injection{Name: "auto", Runtime: true, Nodes: true, CDI: inventory.CDIAuto}},
	} {
		args := []string{}
		if c.nodes {
			args = append(args, "--pass-device-specs=true")
		}
		if c.file == "" {
			c.file = c.text
		}
		for place, read := range map[string]func() (Kubernetes, error){
			"flag": func() (Kubernetes, error) {
				return resolveAll(t, append(args, "--device-list-strategy="+c.text), nil, "")
			},
			"variable": func() (Kubernetes, error) {
				return resolveAll(t, args, map[string]string{"DEVICE_LIST_STRATEGY": c.text}, "")
			},
			"file": func() (Kubernetes, error) {
				return resolveAll(t, args, nil, "flags: {plugin: {deviceListStrategy: "+c.file+"}}")
			},
		} {
			s, err := read()
			if diff := cmp.Diff(c.want, s.Strategies) + cmp.Diff(c.core, s.Core.Injection); diff != "" || err != nil || len(s.Notes) != c.notes {
				t.Errorf("%s by %s: %v %q %s", c.text, place, err, s.Notes, diff)
			}
		}
	}
}

// The options of CDI and of what containers get beside GPUs, with the names of NVIDIA's plugin.
func TestInjectionOptions(t *testing.T) {
	s, err := resolveAll(t, []string{"--cdi-disable-hooks=chmod", "--cdi-disable-hooks=all,chmod", "--cdi-dir=/etc/cdi", "--cdi-feature-flags=disable-nvsandboxutils"},
		map[string]string{"NVIDIA_CTK_PATH": "/opt/nvidia-ctk", "GDS_ENABLED": "true", "IMEX_REQUIRED": "true"}, `
flags:
  gdrcopyEnabled: true
  mofedEnabled: true
  plugin: {deviceIDStrategy: index, cdiAnnotationPrefix: nvidia.cdi.k8s.io/}
imex: {channelIDs: [0]}
`)
	want := CDI{
		Folder: "/etc/cdi", HookPath: "/opt/nvidia-ctk", DisabledHooks: []string{"all", "chmod"}, FeatureFlags: []string{"disable-nvsandboxutils"},
		GDS: true, MOFED: true, GDRCopy: true, IMEXChannels: []int{0},
	}
	if diff := cmp.Diff(want, s.CDI); diff != "" || err != nil || s.AnnotationPrefix != "nvidia.cdi.k8s.io/" {
		t.Error(diff, err, s.AnnotationPrefix)
	}
	if c := s.Core; !c.IndexIDs || !c.IMEXChannel || !c.IMEXRequired {
		t.Errorf("%+v", c)
	}
	const note = "IMEX_REQUIRED has no effect: containers get no IMEX channel, as --imex-channel-ids or imex.channelIDs names none"
	if s, err = resolveAll(t, nil, map[string]string{"IMEX_REQUIRED": "true"}, ""); err != nil || !slices.Equal(s.Notes, []string{note}) {
		t.Errorf("no channel to require: %q, %v", s.Notes, err)
	}
}
