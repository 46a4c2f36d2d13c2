//go:build before1.11.3

package nomad

const placesWithoutDevices = true
