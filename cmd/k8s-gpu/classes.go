package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"regexp"

	"github.com/tandem-gpu/tandem/internal/cli"
	"github.com/tandem-gpu/tandem/internal/config"
	"github.com/tandem-gpu/tandem/internal/config/policy"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/dra/deviceclass"
	"github.com/tandem-gpu/tandem/internal/util/setting"
)

// profileForm is the name of a MIG profile: "1g.10gb", "1c.2g.20gb", "1g.10gb+me".
var profileForm = regexp.MustCompile(`^([0-9]+c\.)?[0-9]+g\.[0-9]+gb([-+.][a-z.]+)*$`)

// classes prints the DeviceClasses for the pools of the settings, or of the files of several groups of nodes, and on request the admission
// policy of the agents' account.
func classes(read func() (settings, error)) func(cli.Classes) ([]byte, error) {
	return func(c cli.Classes) ([]byte, error) {
		s, err := read()
		problems := []error{err}
		all := []deviceclass.Configuration{{MIG: s.Core.MIG, Policy: s.Core.Policy}}
		if len(c.Files) > 0 {
			all = nil
		}
		for _, path := range c.Files {
			one, err := readClasses(path)
			one.MIG = cmp.Or(one.MIG, s.Core.MIG)
			all, problems = append(all, one), append(problems, err)
		}
		for _, profile := range c.Profiles {
			if !profileForm.MatchString(profile) {
				problems = append(problems, &setting.Error{Key: "--mig-profiles", Value: profile, Remedy: "want MIG profiles such as 1g.10gb,3g.40gb"})
			}
		}
		found, err := deviceclass.Of(all, deviceclass.Options{Profiles: c.Profiles, ExtendedResources: c.ExtendedResources})
		problems = append(problems, err)
		var policy []byte
		if c.AdmissionPolicy {
			text, err := deviceclass.AdmissionPolicy(deviceclass.Account{Name: c.ServiceAccount, Namespace: c.Namespace})
			policy, problems = append([]byte("---\n"), text...), append(problems, err)
		}
		if err := errors.Join(problems...); err != nil {
			return nil, err
		}
		printed, err := deviceclass.Print(found)
		return append(printed, policy...), err
	}
}

// readClasses reads what a configuration file has of pools.
func readClasses(path string) (deviceclass.Configuration, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return deviceclass.Configuration{}, fmt.Errorf("configuration file: %w", err)
	}
	f, err := config.ParseFile(path, text, policy.Kubernetes)
	return deviceclass.Configuration{MIG: f.MIG, Policy: f.Policy}, err
}
