// Package shadow runs the built agents' shadow beside what another plugin has registered.
package shadow
