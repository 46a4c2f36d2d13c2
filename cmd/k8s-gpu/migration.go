package main

import (
	"context"

	"github.com/tandem-gpu/tandem/internal/agent"
	"github.com/tandem-gpu/tandem/internal/agent/kube"
	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/cli/importer"
	"github.com/tandem-gpu/tandem/internal/cli/importer/nvidia"
	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/cli/shadow/kubeshadow"
	"github.com/tandem-gpu/tandem/internal/core"
)

// importNVIDIA reads configurations of NVIDIA's plugin.
func importNVIDIA() *cli.Import {
	return &cli.Import{
		Of: "NVIDIA's k8s-device-plugin", Formats: nvidia.Formats, Extension: ".yaml",
		Read: func(path string, text []byte, format string) (importer.Result, error) {
			return nvidia.Import(nvidia.Input{Path: path, Text: text, Format: nvidia.Format(format)})
		},
	}
}

// shadowKubelet compares this agent with the plugin whose devices the kubelet has.
func shadowKubelet(read func() (settings, error)) *cli.Shadow {
	return &cli.Shadow{
		Where: "the kubelet's pod-resources API",
		Open: func(func(string) string) (agent.Options, func(context.Context, core.State) (shadow.Report, error), error) {
			s, err := read()
			o := kubeshadow.Options{
				Socket: s.PodResourcesSocket, ProcRoot: s.Core.Roots.Proc,
				Answers: kube.ResponseOptions(s),
			}
			compare := func(ctx context.Context, state core.State) (shadow.Report, error) {
				return kubeshadow.Compare(ctx, state, o)
			}
			return kube.AgentOptions(s), compare, err
		},
	}
}
