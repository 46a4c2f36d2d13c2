//go:build !before1.11.3

package nomad

// placesWithoutDevices is whether a job is placed without a device if all those are taken that its constraint on device.ids allows:
// free ones are counted without the constraint.
const placesWithoutDevices = false
