// Package use describes what devices do and which work has them: values and pure functions. It changes neither the offer nor the health of
// a device, except that with inventory.OccupancyWithhold the result of Table.Occupied becomes inventory.Host.Occupied.
package use
