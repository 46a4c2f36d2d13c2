//go:build !before1.36

package dra

import (
	"context"

	v1 "k8s.io/api/core/v1"
	drahealth "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	"k8s.io/utils/ptr"
)

// healthMessages is whether the status of a pod has the reason why a device is unhealthy.
const healthMessages = true

func healthMessage(d *drahealth.DeviceHealth) string { return d.GetMessage() }

func statusMessage(r v1.ResourceHealth) string { return ptr.Deref(r.Message, "") }

func (s *apiServer) nodeOf(context.Context) (*v1.Node, error) { return s.node, nil }
