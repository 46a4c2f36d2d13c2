package kubeshadow

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/tandem-gpu/tandem/internal/cli/shadow"
	"github.com/tandem-gpu/tandem/internal/core/inventory"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/deviceplugin"
	"github.com/tandem-gpu/tandem/internal/kubeadapter/podresources"
)

// answerVariables are the variables with which a device plugin of NVIDIA GPUs gives a container its devices.
var answerVariables = []string{
	inventory.VisibleDevices, "NVIDIA_IMEX_CHANNELS", "NVIDIA_GDS", "NVIDIA_MOFED", "NVIDIA_GDRCOPY", "CUDA_MPS_PIPE_DIRECTORY",
}

// compareAnswers compares what containers with devices have in their environment with what this agent would answer. Mounts, device
// nodes and CDI names of a running container are not visible.
func (c *comparison) compareAnswers(held []podresources.Container) {
	var running []podEnvironment
	for _, h := range held {
		if !strings.HasPrefix(h.Resource, domain) {
			continue
		}
		r, err := deviceplugin.Answer(c.allocatable, h.Resource, h.IDs, c.options.Answers)
		if err != nil {
			c.refused(h, err)
			continue
		}
		if running == nil {
			running = podEnvironments(c.options.ProcRoot)
		}
		env, why := environmentOf(running, h, r.GetEnvs())
		if why != "" {
			c.notCompared = append(c.notCompared, work(h)+": "+why)
			continue
		}
		c.compareVariables(h, r.GetEnvs(), env)
	}
}

// refused is for devices that this agent would not give: that a sick one is refused follows from its health.
func (c *comparison) refused(h podresources.Container, err error) {
	if _, unhealthy := errors.AsType[*inventory.UnhealthyUnitsError](err); unhealthy {
		c.notCompared = append(c.notCompared, work(h)+": a new container would not get these devices: "+err.Error())
		return
	}
	c.differences = append(c.differences, shadow.Difference{
		Kind: shadow.KindAnswer, Offer: h.Resource, Work: work(h), Here: "refused: " + err.Error(), There: "allocated " + strings.Join(h.IDs, ","),
	})
}

// compareVariables compares the variables of an answer with those of a container.
func (c *comparison) compareVariables(h podresources.Container, here, there map[string]string) {
	names := slices.Concat(slices.Collect(maps.Keys(here)), answerVariables)
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		mine, theirs := here[name], there[name]
		if mine == theirs || sameList(mine, theirs) {
			continue
		}
		if name == inventory.VisibleDevices && theirs == "void" { // written by a CDI specification
			c.notCompared = append(c.notCompared, work(h)+": it got its devices by CDI, whose names are not visible in a container")
			continue
		}
		c.differences = append(c.differences, shadow.Difference{
			Kind: shadow.KindAnswer, Offer: h.Resource, Work: work(h), Field: name, Here: value(here, name), There: value(there, name),
		})
	}
}

func value(env map[string]string, name string) string {
	if text, ok := env[name]; ok {
		return strconv.Quote(text)
	}
	return "not set"
}

// sameList reports whether two lists have the same items. Their order has no meaning to NVIDIA's container runtime.
func sameList(a, b string) bool {
	x, y := strings.Split(a, ","), strings.Split(b, ",")
	slices.Sort(x)
	slices.Sort(y)
	return slices.Equal(x, y)
}
