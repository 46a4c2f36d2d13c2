// Package use describes what devices do and which work has them: values and pure functions. None of it changes what a device is
// offered as or its health; with inventory.OccupancyWithhold the adapter of it to the monitor is inventory.Host.Occupied.
package use
