// Package upgrade starts today's agents on state directories that the agents of former states of this repository have written,
// and the former agents on what today's have written. "make matrix" runs it (build tag matrix), as it builds every former state.
package upgrade
