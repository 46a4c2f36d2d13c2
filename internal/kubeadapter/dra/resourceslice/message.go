package resourceslice

import (
	"github.com/tandem-gpu/tandem/internal/core/health"
)

// HealthStatus is the health of a device as the kubelet's health stream has it (HealthStatus of dra-health/v1).
type HealthStatus string

// The values of HealthStatus.
const (
	StatusHealthy   HealthStatus = "HEALTHY"
	StatusUnhealthy HealthStatus = "UNHEALTHY"
	StatusUnknown   HealthStatus = "UNKNOWN"
)

// DeviceHealth is what the health stream reports of a device.
type DeviceHealth struct {
	Device  string // its name in the slice
	Status  HealthStatus
	Message string // Health.String(), at most 200 bytes; "" for a healthy device
}

// notObserved is the message of a device that a claim holds and that the inventory does not have.
const notObserved = "no longer offered, its health is not observed"

// Messages returns the health of each device in Devices, in the same order. It is nil if nothing is known so far. That a device is
// withdrawn, or offered by another agent, concerns new work: work that runs on it gets the health that the device has apart from that.
func Messages(in Input) []DeviceHealth {
	if in.Allocatable.Provisional() {
		return nil
	}
	all := []DeviceHealth{}
	for _, l := range in.listings() {
		m := DeviceHealth{Device: l.device.Name, Status: StatusUnknown, Message: notObserved}
		if l.unit.ID != "" {
			m.Status, m.Message = messageOf(in.healthOfWork(l))
		}
		all = append(all, m)
	}
	return all
}

// healthOfWork returns the health that concerns work which runs on a device.
func (in Input) healthOfWork(l listing) health.Health {
	if !newWorkOnly(l.unit.Health.Reason) {
		return l.unit.Health
	}
	for _, h := range in.Allocatable.Conditions(l.unit) {
		if !newWorkOnly(h.Reason) {
			return h
		}
	}
	return health.Health{Limitations: l.unit.Health.Limitations}
}

// newWorkOnly reports whether a reason concerns new work only: those of units in an inventory, except what containers need at their next
// start and what other processes do to the device.
func newWorkOnly(r health.Reason) bool {
	switch r {
	case health.ReasonNoMPS, health.ReasonNoIMEX, health.ReasonNoCDI, health.ReasonOccupied:
		return false
	default:
		return r >= health.ReasonWithdrawn
	}
}

// messageOf returns status and message for a health: the words are those of Nomad's HealthDescription after the cause.
func messageOf(h health.Health) (status HealthStatus, message string) {
	switch {
	case h.Schedulable():
		status = StatusHealthy
	case h.State == health.Unknown:
		status = StatusUnknown
	default:
		status = StatusUnhealthy
	}
	if message = h.String(); message == health.Healthy.String() {
		message = ""
	}
	return status, message
}
