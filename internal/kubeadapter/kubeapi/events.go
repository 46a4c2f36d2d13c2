package kubeapi

import (
	"context"
	"time"
)

// eventGroup is the API group of events.
const eventGroup = "events.k8s.io"

// Longest values in an event, in bytes. The API server refuses longer ones.
const (
	MaxEventInstance = 128
	MaxEventNote     = 1024
)

// PodEvent is events.k8s.io/v1 Event, as agents write it about a pod. The API server keeps it for an hour.
type PodEvent struct {
	APIVersion          string          `json:"apiVersion,omitempty"`
	Kind                string          `json:"kind,omitempty"`
	Metadata            ObjectMeta      `json:"metadata"`
	EventTime           MicroTime       `json:"eventTime"`
	ReportingController string          `json:"reportingController"` // "example.com/controller"
	ReportingInstance   string          `json:"reportingInstance"`
	Action              string          `json:"action"`
	Reason              string          `json:"reason"`
	Type                string          `json:"type"`      // Normal, Warning
	Regarding           ObjectReference `json:"regarding"` // in the namespace of the event
	Note                string          `json:"note,omitempty"`
}

// ObjectReference is the part of v1 ObjectReference that an event of a pod has.
type ObjectReference struct {
	APIVersion string `json:"apiVersion,omitempty"`
	Kind       string `json:"kind,omitempty"`
	Namespace  string `json:"namespace,omitempty"`
	Name       string `json:"name,omitempty"`
	UID        string `json:"uid,omitempty"`
}

// MicroTime is metav1.MicroTime.
type MicroTime struct{ time.Time }

// MarshalJSON returns the time in microseconds.
func (t MicroTime) MarshalJSON() ([]byte, error) {
	return t.UTC().AppendFormat(nil, `"2006-01-02T15:04:05.000000Z07:00"`), nil
}

// CreateEvent creates an event. It fails with ErrExists if the namespace has one of the name.
func (c *Client) CreateEvent(ctx context.Context, e PodEvent) error {
	o := object{eventGroup, "events", e.Metadata.Namespace, ""}
	e.APIVersion, e.Kind = o.version(), "Event"
	return c.do(ctx, call{verb: "create", object: o, body: e}, nil)
}
