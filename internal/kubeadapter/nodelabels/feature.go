package nodelabels

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tandem-gpu/tandem/internal/kubeadapter/kubeapi"
)

// FeatureAPI is the part of Kubernetes' API that a Writer calls. *kubeapi.Client is one.
type FeatureAPI interface {
	NodeFeature(ctx context.Context, namespace, name string) (kubeapi.NodeFeature, error)
	CreateNodeFeature(ctx context.Context, f kubeapi.NodeFeature) error
	UpdateNodeFeature(ctx context.Context, f kubeapi.NodeFeature) error
	PodMetadata(ctx context.Context, namespace, name string) (kubeapi.ObjectMeta, error)
}

// featurePrefix begins the name of the object: that of gpu-feature-discovery, whose object this agent takes over.
const featurePrefix = "nvidia-features-for-"

// featureEvery is the time between looks at an object that should have the labels already: another program may have changed it.
const featureEvery = 10 * time.Minute

// feature is the NodeFeature object of this node, which the master of NFD reads. A DaemonSet that is deleted takes it along: with its pod it owns
// the object.
type feature struct {
	opts   Options
	last   Labels                   // that the object has; nil = not known
	looked time.Time                // when it was seen to have them
	owners []kubeapi.OwnerReference // nil = not known yet
}

func (f *feature) name() string  { return "object" }
func (f *feature) place() string { return f.opts.Namespace + "/" + featurePrefix + f.opts.Node }
func (f *feature) remedy() string {
	return "--use-node-feature-api needs Node Feature Discovery, and the rights that its documentation lists"
}

// put implements target. Without labels the object has none.
func (f *feature) put(ctx context.Context, l Labels) (written bool, err error) {
	if f.last != nil && maps.Equal(l, f.last) && time.Since(f.looked) < featureEvery {
		return false, nil
	}
	f.last = nil
	if written, err = f.write(ctx, l); err != nil {
		return false, fmt.Errorf("NodeFeature %s: %w", f.place(), err)
	}
	f.last, f.looked = maps.Clone(l), time.Now()
	return written, nil
}

func (f *feature) write(ctx context.Context, l Labels) (written bool, err error) {
	if err := f.findOwners(ctx); err != nil {
		return false, err
	}
	name, api := featurePrefix+f.opts.Node, f.opts.API
	object, err := api.NodeFeature(ctx, f.opts.Namespace, name)
	exists := err == nil
	if err != nil && !isMissing(err) {
		return false, err
	}
	present := maps.Clone(Labels(object.Spec.Labels))
	_, timestamp := present[timestampLabel]
	delete(present, timestampLabel)
	same := maps.Equal(present, l) && timestamp != (f.opts.NoTimestamp || len(l) == 0)
	if exists && same && object.Metadata.Labels[kubeapi.NodeNameLabel] == f.opts.Node && slices.EqualFunc(object.Metadata.OwnerReferences, f.owners, sameOwner) {
		return false, nil
	}
	all := l
	if !f.opts.NoTimestamp && len(l) > 0 {
		all = l.at(time.Now())
	}
	object.Metadata.Namespace, object.Metadata.Name = f.opts.Namespace, name
	object.Metadata.Labels = map[string]string{kubeapi.NodeNameLabel: f.opts.Node}
	object.Metadata.OwnerReferences, object.Spec.Labels = f.owners, all
	if exists {
		return true, api.UpdateNodeFeature(ctx, object)
	}
	return true, api.CreateNodeFeature(ctx, object)
}

// isMissing reports whether there is no such object, other than no such API.
func isMissing(err error) bool {
	status, ok := errors.AsType[*kubeapi.StatusError](err)
	return errors.Is(err, kubeapi.ErrNotFound) && (!ok || !status.Unserved())
}

// findOwners finds the pod and its DaemonSet, once. The object is deleted when neither exists any more.
func (f *feature) findOwners(ctx context.Context) error {
	if f.opts.Pod == "" || f.owners != nil {
		return nil
	}
	pod, err := f.opts.API.PodMetadata(ctx, f.opts.Namespace, f.opts.Pod)
	if err != nil {
		return err
	}
	owners := []kubeapi.OwnerReference{}
	controls := true
	for _, o := range pod.OwnerReferences {
		if o.Kind == "DaemonSet" {
			owners = append(owners, kubeapi.OwnerReference{APIVersion: o.APIVersion, Kind: o.Kind, Name: o.Name, UID: o.UID, Controller: &controls},
				kubeapi.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID})
			break
		}
	}
	f.owners = owners
	return nil
}

func sameOwner(a, b kubeapi.OwnerReference) bool {
	a.Controller, b.Controller = nil, nil
	return a == b
}
