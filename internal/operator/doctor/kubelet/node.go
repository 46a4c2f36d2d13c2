package kubelet

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
	"github.com/tandem-gpu/tandem/internal/operator/doctor"
	"github.com/tandem-gpu/tandem/internal/util/problem"
)

// NodeLabels are the settings by which the agent follows labels of its Node.
type NodeLabels struct {
	Node   string   // name of the Node object
	Labels []string // that the agent reads
	API    kubeapi.Options
}

const nodeCheck = "node labels"

// Check is the check of the Node, and of the rights to read and to watch it.
func (o NodeLabels) Check() doctor.Check {
	return doctor.Check{Name: nodeCheck, Place: "Node " + o.Node, Decides: problem.NodeUnread, Look: o.look}
}

func (o NodeLabels) look(ctx context.Context, _ *doctor.Facts) []doctor.Finding {
	effect := "a change of the label " + strings.Join(o.Labels, " or ") + " has no effect: "
	bad := func(place, found, remedy string) []doctor.Finding {
		return []doctor.Finding{finding(nodeCheck, doctor.Problem, place, effect+found, remedy)}
	}
	client, err := kubeapi.New(o.API)
	if err != nil {
		return bad("--kube-api", err.Error(), "set --kube-api, --kube-token-file and --kube-ca-file, or run doctor in the agent's pod")
	}
	switch err := o.read(ctx, client); {
	case errors.Is(err, kubeapi.ErrNotFound):
		return bad(client.Server(), fmt.Sprintf("there is no Node %q", o.Node), "set --node-name to the name that kubectl get nodes shows, or NODE_NAME from spec.nodeName")
	case errors.Is(err, kubeapi.ErrForbidden), errors.Is(err, kubeapi.ErrUnauthorized):
		return bad(client.Server(), err.Error(), "apply the agent's RBAC: get and watch on nodes, which the chart gives it with config.map, or run doctor in the agent's pod, with its token")
	case err != nil:
		return bad(client.Server(), "no answer: "+err.Error(), "the kubelet must reach the same server: journalctl -u kubelet; with a network policy allow egress of the agent's pod")
	}
	return []doctor.Finding{finding(nodeCheck, doctor.OK, client.Server(), "Node "+o.Node+" can be read and watched", "")}
}

// read reads the Node and begins a watch of it, as the agent does.
func (o NodeLabels) read(ctx context.Context, client *kubeapi.Client) error {
	node, err := client.NodeMetadata(ctx, o.Node)
	if err != nil {
		return err
	}
	for e, err := range client.WatchNode(ctx, o.Node, node.ResourceVersion) {
		if err != nil || e.Type == kubeapi.Opened {
			return err
		}
	}
	return nil
}
