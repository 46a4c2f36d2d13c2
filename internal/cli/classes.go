package cli

import (
	"context"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/tandem-gpu/tandem/internal/cli/command"
)

// Classes are the options of the verb "classes".
type Classes struct {
	Files             []string // configurations of groups of nodes; none = that of this agent
	Profiles          []string // MIG profiles of the nodes
	ExtendedResources bool

	AdmissionPolicy           bool // also that of the agents' account
	ServiceAccount, Namespace string
}

// defaultAccount is that of the shipped manifests.
const defaultAccount = "tandem-k8s-gpu"

// maxFiles limits the configurations of one command.
const maxFiles = 1000

func (p Program) classesVerb() verb {
	return verb{
		Name: "classes", ArgsUsage: "[FILE...]", MaxArgs: maxFiles,
		Usage: "print the DeviceClasses for the pools of the configuration, or of several groups of nodes, for Dynamic Resource Allocation",
		Flags: []cli.Flag{
			text("mig-profiles", "MIG profiles of the nodes' instances, such as 1g.10gb,3g.40gb; those that the policy names are known"),
			&cli.BoolFlag{Name: "extended-resources", Value: true, Usage: "map nvidia.com/<pool> to the classes, so that pods which request it need no claim"},
			&cli.BoolFlag{Name: "admission-policy", Usage: "also print the ValidatingAdmissionPolicy that keeps an agent to the ResourceSlices of its node; the shipped manifests and the chart have it"},
			&cli.StringFlag{Name: "service-account", Value: defaultAccount, Usage: "of the agents, for the policy, which gets the same name"},
			text("namespace", "of that service account; any if not given"),
		},
		Do: func(_ context.Context, c *cli.Command) error {
			o := Classes{Files: c.Args().Slice(), ExtendedResources: c.Bool("extended-resources"),
				AdmissionPolicy: c.Bool("admission-policy"), ServiceAccount: c.String("service-account"), Namespace: c.String("namespace")}
			if !o.AdmissionPolicy && (c.IsSet("service-account") || c.IsSet("namespace")) {
				return command.Usagef("classes: --service-account and --namespace are those of --admission-policy")
			}
			for _, profile := range strings.Split(c.String("mig-profiles"), ",") {
				if profile = strings.TrimSpace(profile); profile != "" {
					o.Profiles = append(o.Profiles, profile)
				}
			}
			printed, err := p.Classes(o)
			if err != nil {
				return err
			}
			_, err = p.Stdout.Write(printed)
			return err
		},
	}
}
